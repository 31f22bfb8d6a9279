"""What `offbeat eval` evaluates, and the run that it makes of a recipe."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.config.run import RunConfig
from offbeat.launch.evaluate import (
    NoPrompts,
    NothingToEvaluate,
    check_can_evaluate,
    evaluation_only,
    recipe_and_model,
)


def run_config(**settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"steps": 500, "model": {"path": "m"}, "name": "mine", **settings}
    )


def run_of(folder: Path, *models: str) -> Path:
    (folder / "config.yaml").write_text("steps: 1\n")
    for name in models:
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "config.json").write_text("{}")
    return folder


def test_a_recipe_is_evaluated_with_its_own_model(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    assert recipe_and_model(recipe) == (recipe, [])


def test_the_newest_model_of_a_run_is_evaluated(tmp_path: Path) -> None:
    run = run_of(tmp_path, "step_90", "step_1000", "state_2000")
    model = run / "checkpoints" / "step_1000"
    assert recipe_and_model(run) == (
        run / "config.yaml",
        [f"model.path={model}", "model.weights=null"],
    )


def test_one_model_of_a_run_is_evaluated_under_the_recipe_of_that_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, "step_90", "step_1000")
    model = run / "checkpoints" / "step_90"
    assert recipe_and_model(model) == (
        run / "config.yaml",
        [f"model.path={model}", "model.weights=null"],
    )


@pytest.mark.parametrize(
    ("below", "problem"),
    [
        ("", "holds no exported model"),
        ("checkpoints/state_20", "is a trainer's state, not a model"),
        ("checkpoints", "is neither a run nor an exported model of one"),
    ],
)
def test_what_is_no_model_is_refused_by_name(tmp_path: Path, below: str, problem: str) -> None:
    run = run_of(tmp_path, "state_20")
    with pytest.raises(NothingToEvaluate, match=problem):
        recipe_and_model(run / below)


def test_a_dry_run_has_no_model_to_evaluate(tmp_path: Path) -> None:
    run = run_of(tmp_path, "step_20")
    (run / "checkpoints" / "step_20" / "config.json").unlink()
    with pytest.raises(NothingToEvaluate, match="is a dry run, which trains a stub"):
        recipe_and_model(run)


def test_an_evaluation_has_the_engines_of_its_recipe_no_trainer_and_nothing_to_save() -> None:
    sets = {"math": {"prompts": 3}}
    config = evaluation_only(
        run_config(
            generator={"engines": 4, "max_sequences": 8},
            trainer={"backend": "torch", "cpus": 2.0, "gpus": 1.0},
            eval={"samples": 4, "sets": sets},
        )
    )
    assert (config.generator.engines, config.trainer.backend, config.trainer.cpus) == (4, "stub", 0)
    assert (config.checkpoint.interval, config.checkpoint.final) == (0, False)
    assert config.eval.at_start
    assert config.eval.named_sets["math"].samples == 4
    assert config.name == "mine-eval"
    assert NoPrompts().prompt(0) is None


@pytest.mark.plugins
def test_a_recipe_without_engines_is_refused() -> None:
    with pytest.raises(NothingToEvaluate, match=r"offbeat eval RECIPE model\.path=DIRECTORY"):
        check_can_evaluate(run_config(generator={"backend": "none"}))
    for backend in ("embedded", "vllm", "stub"):
        check_can_evaluate(run_config(generator={"backend": backend}))


@pytest.mark.plugins
def test_engines_that_wait_for_quantized_weights_evaluate_no_others() -> None:
    quantized = {"generator": {"backend": "vllm"}, "sync": {"quantize": "fp8_block"}}
    with pytest.raises(NothingToEvaluate, match=r"sync\.quantize=null"):
        check_can_evaluate(run_config(**quantized))

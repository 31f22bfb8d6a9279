"""The key of the runtime: its short form, and what one process cannot run."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def clashes_of(**sections: Any) -> list[str]:
    values = {"steps": 1, "model": {"path": "."}, "runtime": {"backend": "local"}, **sections}
    return [f"{each.message}. {each.hint}" for each in clashes(RunConfig.model_validate(values))]


@pytest.mark.parametrize(
    "written", ["runtime=local", "runtime.backend=local", "runtime={backend: local}"]
)
def test_the_runtime_may_be_written_as_one_word(written: str) -> None:
    assert load_recipe(QUICKSTART, [written]).config.runtime.backend == "local"


def test_one_word_in_a_recipe_leaves_room_for_the_variables_of_an_override(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: {QUICKSTART}\nruntime: local\n")
    runtime = load_recipe(recipe, ["runtime.env.OMP_NUM_THREADS=2"]).config.runtime
    assert (runtime.backend, runtime.env) == ("local", {"OMP_NUM_THREADS": "2"})


def test_another_word_is_refused_with_the_runtimes_there_are() -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(QUICKSTART, ["runtime=lokal"])
    assert "runtime.backend = 'lokal': has to be: one of ray, local" in str(refused.value)
    assert "Did you mean `local`?" in str(refused.value)


def test_a_run_of_one_rank_and_embedded_engines_fits_into_one_process() -> None:
    assert clashes_of(generator={"engines": 2}) == []


def test_a_device_needs_no_reserved_gpu_in_one_process() -> None:
    assert clashes_of(trainer={"device": "cuda"}, generator={"device": "cuda"}) == []


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"generator": {"backend": "vllm"}},
            (
                "runtime.backend=local cannot run with generator.backend=vllm: vLLM starts processes and "
                "patches torch in its own. Leave runtime.backend out, to run on Ray, or set "
                "generator.backend to embedded."
            ),
        ),
        (
            {"trainer": {"backend": "megatron"}},
            (
                "runtime.backend=local cannot run with trainer.backend=megatron: its global state belongs to "
                "one process per rank. Leave runtime.backend out, to run on Ray, or set trainer.backend to "
                "torch."
            ),
        ),
        (
            {"trainer": {"data_parallel": 2}},
            (
                "runtime.backend=local cannot run 2 trainer ranks: each rank is a process. Leave "
                "runtime.backend out, to run on Ray, or set trainer.data_parallel and "
                "trainer.tensor_parallel to 1 and leave trainer.encoder out."
            ),
        ),
        (
            {"environment": {"workers": 2}},
            (
                "runtime.backend=local cannot run with environment.workers=2: one worker serves all groups "
                "of a process. Leave runtime.backend out, to run on Ray, or set environment.workers to 1."
            ),
        ),
        (
            {"sync": {"transport": "reshard"}},
            (
                "runtime.backend=local cannot run with sync.transport=reshard: engines read the trainer's "
                "release from memory of their process. Leave runtime.backend out, to run on Ray, or leave "
                "sync.transport out."
            ),
        ),
    ],
)
def test_what_needs_several_processes_is_refused_by_name(
    sections: dict[str, Any], told: str
) -> None:
    assert told in clashes_of(**sections)

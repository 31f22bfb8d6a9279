"""The recipes for real models, as far as a machine without them can tell."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from typer.testing import CliRunner

from offbeat.config.base import of_kind
from offbeat.config.loader import load_recipe
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.environments.factory import make_prompts
from offbeat.environments.gsm8k import row_answer
from offbeat.launch.checks.software import gpus_wanted
from offbeat.launch.commands.main import app
from offbeat.plugins.vllm.section import VllmGeneratorConfig

ROOT = Path(__file__).parents[4]
NODE = "grpo-gsm8k-1node"
GSM8K = [("grpo-gsm8k-1gpu", 1), (NODE, 8)]
COMMENTED = ("transport=reshard", "delta=true")  # keys of section ``sync``


@pytest.mark.parametrize(("name", "gpus"), GSM8K)
def test_a_recipe_asks_for_the_gpus_in_its_name(name: str, gpus: int) -> None:
    config = load_recipe(ROOT / "recipes" / f"{name}.yaml").config
    assert gpus_wanted(config) == gpus
    assert of_kind(VllmGeneratorConfig, config.generator).device == "cuda"
    assert of_kind(TorchTrainerConfig, config.trainer).device == "cuda"


@pytest.mark.parametrize(
    ("name", "more"),
    [("grpo-gsm8k-1gpu", []), (NODE, []), *((NODE, [f"sync.{each}"]) for each in COMMENTED)],
)
def test_what_a_machine_lacks_is_told_and_nothing_else(
    tmp_path: Path, name: str, more: list[str]
) -> None:
    """Also with each key that the recipe has as a comment."""
    recipe = ROOT / "recipes" / f"{name}.yaml"
    for each in more:
        key, value = each.removeprefix("sync.").split("=")
        assert f"\n  # {key}: {value} " in recipe.read_text()
    (tmp_path / "rows.jsonl").write_text('{"question": "6 * 12?", "answer": "#### 72"}\n')
    overrides = [
        f"model.path={ROOT / 'models' / 'tiny-addition'}",
        "generator.max_model_len=512",
        "generator.sampling.max_new_tokens=256",
        *(f"{key}.path={tmp_path / 'rows.jsonl'}" for key in ("data", "eval")),
        "eval.allow_overlap=true",
        "wandb.mode=disabled",
        *more,
    ]
    result = CliRunner().invoke(
        app, ["check", str(recipe), *overrides, "--run-dir", str(tmp_path / "run")]
    )
    errors = [line for line in result.stdout.splitlines() if line.startswith("error")]
    # Where there is a GPU, or vLLM, there is less to tell.
    assert all(line.split()[1] in ("vllm:", "gpus:") for line in errors), result.stdout


@pytest.mark.parametrize(("name", "_gpus"), GSM8K)
def test_a_model_and_files_that_are_not_there_are_told_with_what_to_set(
    tmp_path: Path, name: str, _gpus: int
) -> None:
    recipe = str(ROOT / "recipes" / f"{name}.yaml")
    overrides = [f"{key}.path={tmp_path / 'absent'}" for key in ("model", "data", "eval")]
    result = CliRunner().invoke(app, ["check", recipe, *overrides])
    assert result.exit_code == 2
    for fix in ("Point model.path at", "Point data.path at", "Point eval.path at"):
        assert fix in result.stdout


def test_the_recipe_of_a_mixture_of_experts_is_checked_but_for_what_the_machine_lacks(
    tmp_path: Path,
) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra megatron")
    model, rows = tmp_path / "glm", tmp_path / "rows.jsonl"
    rows.write_text('{"question": "6 * 12?", "answer": "#### 72"}\n')
    shutil.copytree(ROOT / "models" / "tiny-addition", model)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 4}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    tiny = Glm4MoeConfig(vocab_size=vocabulary, **sizes, **heads, eos_token_id=1)
    Glm4MoeForCausalLM(tiny).save_pretrained(model)
    recipe = str(ROOT / "recipes" / "grpo-gsm8k-glm-air.yaml")
    paths = [f"{key}.path={rows}" for key in ("data", "eval")]
    overrides = [f"model.path={model}", *paths, "generator.max_model_len=512"]
    overrides += ["eval.allow_overlap=true"]
    overrides += ["generator.sampling.max_new_tokens=256", "wandb.mode=disabled"]
    out = (
        CliRunner()
        .invoke(app, ["check", recipe, *overrides, "--run-dir", str(tmp_path / "run")])
        .stdout
    )
    assert "64 ranks; the largest holds" in out
    errors = [line for line in out.splitlines() if line.startswith("error")]
    assert all(line.split()[1] in ("vllm:", "gpus:", "memory:") for line in errors), out


def test_the_sums_of_smollm2_are_all_of_one_digit_and_right() -> None:
    loaded = load_recipe(ROOT / "recipes" / "smollm2-addition.yaml")
    source = make_prompts(loaded.config)
    rows = [prompt.data for place in range(100) if (prompt := source.prompt(place)) is not None]
    assert source.rows == 100
    assert sorted((row["question"], row_answer(row)) for row in rows) == sorted(
        (f"What is {a} + {b}?", str(a + b)) for a in range(10) for b in range(10)
    )

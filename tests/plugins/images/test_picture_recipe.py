"""Recipes for models that read pictures, as far as a machine without their models can tell."""

import json
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from PIL import Image
from typer.testing import CliRunner

from offbeat.config.loader import load_recipe
from offbeat.launch.commands.main import app
from offbeat.plugins.images.digits import picture

ROOT = Path(__file__).parents[3]


def test_what_a_machine_lacks_is_told_and_nothing_else(tmp_path: Path) -> None:
    Image.fromarray(picture(0, 0).pixels).save(tmp_path / "a.png")
    parts = [{"type": "image"}, {"type": "text", "text": "="}]
    row = {"messages": [{"role": "user", "content": parts}], "image": "a.png", "answer": "7"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    overrides = [
        f"model.path={ROOT / 'models' / 'tiny-digits'}",
        "generator.max_model_len=64",
        "generator.sampling.max_new_tokens=8",
        *(f"{key}.path={tmp_path / 'rows.jsonl'}" for key in ("data", "eval")),
        "eval.allow_overlap=true",
        "wandb.mode=disabled",
    ]
    recipe = str(ROOT / "recipes" / "smolvlm-1gpu.yaml")
    result = CliRunner().invoke(
        app, ["check", recipe, *overrides, "--run-dir", str(tmp_path / "run")]
    )
    errors = [line for line in result.stdout.splitlines() if line.startswith("error")]
    # Where there is a GPU, or the extra math, there is less to tell.
    assert all(line.split()[1] in ("gpus:", "environment:") for line in errors), result.stdout
    assert "pictures: prompts of data.path encoded with their pictures: 1; 8 tokens" in (
        result.stdout
    )


@pytest.mark.parametrize("steps", [1, 2, 100, 5000])
def test_the_quickstart_with_images_can_be_made_shorter_or_longer_by_steps_alone(
    steps: int,
) -> None:
    recipe = ROOT / "recipes" / "quickstart-images.yaml"
    assert load_recipe(recipe, [f"steps={steps}"]).config.steps == steps

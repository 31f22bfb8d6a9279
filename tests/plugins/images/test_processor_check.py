"""``offbeat check`` runs the model's image processor, and holds the result against its config."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from picture_models import write_gemma3, write_qwen
from transformers import AutoTokenizer, PreTrainedConfig

from offbeat.messages.finding import Finding
from offbeat.plugins.images.prompt_check import check_pictures
from tests.support.image_text_models import make
from tests.support.recipes import make_config

_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
}


def findings(model: Path) -> list[Finding]:
    config = make_config(model, environment={"name": "digits", "images": {}})
    return list(check_pictures(config))


def idefics3(folder: Path) -> None:
    shutil.copytree("models/tiny-digits", folder, dirs_exist_ok=True)


def qwen(folder: Path, family: str) -> None:
    write_qwen(folder, family)
    config = make(family).config
    config.vision_config.temporal_patch_size = 2
    _save(folder, config)


def gemma3(folder: Path) -> None:
    write_gemma3(folder)
    _save(folder, make("gemma3").config)


def _save(folder: Path, config: PreTrainedConfig) -> None:
    """Write a config whose tokens are those of the tokenizer in the folder."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    config.save_pretrained(folder)
    known = {key: tokenizer.convert_tokens_to_ids(text) for key, text in _TOKENS.items()}
    written = json.loads((folder / "config.json").read_text())
    changed(folder, "config.json", **{key: id_ for key, id_ in known.items() if key in written})


def changed(folder: Path, file: str, **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def changed_tower(folder: Path, **values: Any) -> None:
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    changed(folder, "config.json", vision_config=vision | values)


FAMILIES: dict[str, Callable[[Path], None]] = {
    "idefics3": idefics3,
    "gemma3": gemma3,
    "qwen2_5_vl": lambda folder: qwen(folder, "qwen2_5_vl"),
    "qwen3_vl": lambda folder: qwen(folder, "qwen3_vl"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_processor_of_the_same_model_fits(tmp_path: Path, family: str) -> None:
    FAMILIES[family](tmp_path)
    told = str(findings(tmp_path)[0])
    assert told.startswith("ok")
    assert "the processor fits the model's config" in told


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("idefics3", lambda f: changed_tower(f, image_size=64), "[3, 32, 32], but the model reads"),
        ("idefics3", lambda f: changed(f, "config.json", scale_factor=1), "its pictures take 16"),
        ("idefics3", lambda f: changed(f, "config.json", image_token_id=6), "has 0 placeholder"),
        ("gemma3", lambda f: changed_tower(f, image_size=64), "[3, 32, 32], but the model reads"),
        ("gemma3", lambda f: changed(f, "config.json", mm_tokens_per_image=9), "pictures take 9"),
        ("qwen2_5_vl", lambda f: changed_tower(f, patch_size=16), "not of 1536 values"),
        ("qwen2_5_vl", lambda f: changed_tower(f, temporal_patch_size=1), "not of 192 values"),
        ("qwen3_vl", lambda f: changed_tower(f, spatial_merge_size=1), "its pictures take"),
        ("qwen3_vl", lambda f: changed(f, "config.json", image_token_id=7), "has 0 placeholder"),
    ],
)
def test_a_processor_of_another_model_is_an_error(
    tmp_path: Path, family: str, change: Callable[[Path], None], told: str
) -> None:
    FAMILIES[family](tmp_path)
    change(tmp_path)
    (found,) = findings(tmp_path)
    assert str(found).startswith("error")
    assert "does not fit its config.json: a prompt with a picture of 640 x 480 pixels" in str(found)
    assert told in str(found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "content",
    ["", "[]", "7", '{"size": 7}', '{"size": {"width": []}}', '{"image_mean": {"a": 1}}'],
)
def test_a_damaged_processor_is_an_error_that_names_its_class(
    tmp_path: Path, family: str, content: str
) -> None:
    FAMILIES[family](tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (tmp_path / name).exists():
            (tmp_path / name).write_text(content)
    (found,) = findings(tmp_path)
    assert str(found).startswith("error")
    assert "image processor" in str(found)
    assert "Error" in str(found)


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "model": {"type": "none"}}'])
def test_a_damaged_tokenizer_is_an_error(tmp_path: Path, content: str) -> None:
    idefics3(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    (found,) = findings(tmp_path)
    assert str(found).startswith("error")
    assert "its image processor cannot be loaded" in str(found)

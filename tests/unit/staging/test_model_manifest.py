"""Which files of a model directory are staged, what a node keeps of them, and what is refused."""

import json
from pathlib import Path

import pytest

from offbeat.staging.hub_model import HubModel, hub_model
from offbeat.staging.manifest import (
    ManifestFile,
    ModelManifest,
    NothingToStage,
    left_out_pickles,
    staged_names,
)
from offbeat.staging.plan import MARGIN_BYTES, foreign_names, plan_copy
from offbeat.staging.progress import ProgressMeter
from offbeat.staging.source import read_manifest

FILES = (
    ManifestFile("model.safetensors", 100, "aa"),
    ManifestFile("config.json", 10, "bb"),
)
MANIFEST = ModelManifest(FILES)


def test_the_config_is_staged_last_and_pickles_hidden_and_other_folders_files_are_not() -> None:
    names = ["config.json", "a.safetensors", "chat_template.jinja", "old.bin", ".gitattributes"]
    names += ["additional_chat_templates/tools.jinja", "original/a.safetensors", "tokenizer.json"]
    assert staged_names("m", names) == [
        "a.safetensors",
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "tokenizer.json",
        "config.json",
    ]


def test_of_a_training_checkpoint_the_manifest_is_staged_last() -> None:
    names = ["manifest.json", "state.safetensors", "model.safetensors", ".manifest.json.tmp"]
    want = ["model.safetensors", "state.safetensors", "manifest.json"]
    assert staged_names("state_4", names) == want


def test_pickles_that_are_left_out_are_named_and_those_of_other_folders_are_not() -> None:
    names = ["config.json", "a.safetensors", "b.bin", "a.pt", "original/c.pth", ".hidden.bin"]
    assert left_out_pickles(names) == ("a.pt", "b.bin")


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["config.json", "pytorch_model.bin"], r"pickles \(pytorch_model.bin\), which run code"),
        (["config.json"], r"it has no \*.safetensors"),
        (["model.safetensors"], "it has no config.json"),
    ],
)
def test_a_directory_without_a_config_or_safetensors_is_refused(
    names: list[str], problem: str
) -> None:
    with pytest.raises(NothingToStage, match=problem):
        staged_names("m", names)


def test_a_model_that_lacks_a_shard_of_its_index_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "1.safetensors").write_bytes(b"1")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(NothingToStage, match="names files that are not there: 2"):
        read_manifest(tmp_path, ProgressMeter())


def test_a_directory_that_is_gone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NothingToStage, match="No such file"):
        read_manifest(tmp_path / "none", ProgressMeter())


def test_a_file_is_kept_by_its_digest_alone() -> None:
    plan = plan_copy(MANIFEST, {"model.safetensors": "aa", "config.json": "other"})
    assert [file.name for file in plan.kept] == ["model.safetensors"]
    assert [file.name for file in plan.copied] == ["config.json"]


def test_room_is_needed_for_what_is_copied_and_a_margin_and_for_nothing_if_nothing_is() -> None:
    plan = plan_copy(MANIFEST, {})
    assert plan.missing_bytes(110 + MARGIN_BYTES) == 0
    assert plan.missing_bytes(109 + MARGIN_BYTES) == 1
    assert plan_copy(MANIFEST, {file.name: file.sha256 for file in FILES}).missing_bytes(0) == 0


def test_files_that_would_mix_with_the_model_are_foreign() -> None:
    names = ["config.json", ".hidden", "other/x.txt", "pytorch_model.bin", "model-2.safetensors"]
    assert foreign_names(MANIFEST, names) == ["model-2.safetensors", "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("owner/name", HubModel("owner/name", None)),
        ("hf://owner/name@refs%2Fpr%2F1", HubModel("owner/name", "refs/pr/1")),
        ("owner/name@main", HubModel("owner/name", "main")),
        ("name", None),
        ("/a/model", None),
        ("hf://datasets/owner/name", None),
    ],
)
def test_a_model_of_the_hub_is_named_by_owner_and_name(text: str, model: HubModel | None) -> None:
    assert hub_model(text) == model

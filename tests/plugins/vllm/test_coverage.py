"""Which tensors of a model's files a release has to bring to a vLLM engine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offbeat.plugins.vllm.coverage import read_coverage
from offbeat.weight_sync.errors import CoverageRefused
from offbeat.weight_sync.manifest import Manifest, plan

TRAINED = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.experts.0.down_proj.weight",
    "lm_head.weight",
)


def directory(folder: Path, more: Sequence[str], **settings: Any) -> Path:
    tensors = {name: torch.zeros(2, 2) for name in (*TRAINED, *more)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **settings}))
    return folder


def manifest(names: Sequence[str] = TRAINED) -> Manifest:
    return plan([(name, (2, 2), "float32") for name in names], 1 << 20)


@pytest.mark.parametrize(
    ("unread", "settings"),
    [
        (["model.layers.2.eh_proj.weight"], {"num_nextn_predict_layers": 1}),
        (
            ["model.layers.2.enorm.weight", "model.layers.3.mlp.experts.0.up_proj.weight"],
            {"num_nextn_predict_layers": 2},
        ),
        (["mtp.layers.0.mlp.gate.weight", "mtp.fc.weight"], {}),
        (["model.mtp_block.0.mlp.up_proj.weight"], {}),
        (["model.layers.1.self_attn.rotary_emb.inv_freq"], {}),
        (
            ["model.language_model.layers.2.eh_proj.weight"],
            {"text_config": {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}},
        ),
    ],
)
def test_what_the_model_does_not_read_need_not_be_in_a_release(
    tmp_path: Path, unread: list[str], settings: dict[str, Any]
) -> None:
    """No trainer has these tensors: a model whose files hold them could not be served at all."""
    coverage = read_coverage(str(directory(tmp_path, unread, **settings)), "float32")
    coverage.check(1, manifest())
    coverage.check(2, manifest((*TRAINED, *unread)))
    with pytest.raises(CoverageRefused, match=r"model\.layers\.0\.mlp"):
        coverage.check(3, manifest([name for name in TRAINED if "layers.0" not in name]))


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ("model.layers.2.mlp.up_proj.weight", {}),
        ("model.layers.3.mlp.up_proj.weight", {"num_nextn_predict_layers": 1}),
        ("model.layers.1.mlp.up_proj.weight", {"num_nextn_predict_layers": 1}),
        ("vision_tower.encoder.layers.2.mlp.fc1.weight", {"num_nextn_predict_layers": 1}),
        ("model.layers.1.mtp_gate.weight", {}),
    ],
)
def test_any_other_tensor_of_the_files_is_needed(
    tmp_path: Path, more: str, settings: dict[str, Any]
) -> None:
    coverage = read_coverage(str(directory(tmp_path, [more], **settings)), "float32")
    with pytest.raises(CoverageRefused, match=more.replace(".", r"\.")):
        coverage.check(1, manifest())

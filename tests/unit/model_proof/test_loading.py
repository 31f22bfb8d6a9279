import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.generators.embedded.model import load_model
from offbeat.model_proof.loading import (
    WeightsMismatch,
    check_files,
    load_causal_lm,
)
from offbeat.trainers.torch import TorchTrainer
from tests.support.model_families import FAMILIES, family_model

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"
QUICK = {"Llama", "GPT2", "Qwen3Moe", "Bloom", "Mamba2", "Gemma2"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def change_settings(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def read_whole(folder: Path) -> None:
    load_causal_lm(folder, torch.float32, trust_remote_code=False)


def read_headers(folder: Path) -> None:
    check_files(folder)


def start_trainer(folder: Path) -> None:
    TorchTrainer(
        folder,
        trainer=TorchTrainerConfig(),
        model=ModelConfig(path=str(folder)),
        total_steps=1,
        max_model_len=64,
    )


def start_engine(folder: Path) -> None:
    load_model(folder, torch.float32, "cpu", trust_remote_code=False)


@pytest.mark.parametrize("read", [read_whole, read_headers, start_trainer, start_engine])
def test_a_model_whose_files_lack_a_layer_is_refused(
    folder: Path, read: Callable[[Path], None]
) -> None:
    change_weights(folder, lambda w: {name: w[name] for name in w if "layers.1." not in name})
    with pytest.raises(WeightsMismatch) as refused:
        read(folder)
    assert len(refused.value.missing) == 11
    assert all("layers.1." in name for name in refused.value.missing)
    assert "lack 11 tensors of the model" in str(refused.value)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)  # noqa: S301


@pytest.mark.parametrize("read", [read_whole, read_headers, start_trainer, start_engine])
def test_a_model_whose_config_has_fewer_layers_than_its_files_is_refused(
    folder: Path, read: Callable[[Path], None]
) -> None:
    change_settings(folder, num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(WeightsMismatch) as refused:
        read(folder)
    assert not refused.value.missing
    assert "that the model has no place for" in refused.value.problem


@pytest.mark.parametrize("read", [read_whole, read_headers])
def test_a_weight_of_another_shape_is_refused_by_name(
    folder: Path, read: Callable[[Path], None]
) -> None:
    name = "model.norm.weight"
    change_weights(folder, lambda w: w | {name: w[name][:-1].clone()})
    with pytest.raises(WeightsMismatch) as refused:
        read(folder)
    assert refused.value.reshaped == (name,)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in FAMILIES],
)
def test_what_transformers_has_saved_lacks_nothing_and_holds_nothing_else(
    family: str, tmp_path: Path
) -> None:
    transformers.logging.disable_progress_bar()
    family_model(family).save_pretrained(tmp_path)
    read_whole(tmp_path)
    read_headers(tmp_path)

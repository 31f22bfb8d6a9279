"""Exports of the torch trainer, against what transformers writes and reads."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.torch.model import load_model
from offbeat.trainers.torch.state import save_model
from offbeat.weight_sync.chunks import iterate_weights

T = TypeVar("T")
EXPERTS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
BOUND = 20_000  # bytes of a file


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(3)
    paths = {name: tmp_path_factory.mktemp(name) for name in ("qwen3_moe", "mixtral")}
    moe = Qwen3MoeConfig(**EXPERTS, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    Qwen3MoeForCausalLM(moe).save_pretrained(paths["qwen3_moe"])
    mixtral = MixtralConfig(**EXPERTS, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(mixtral).save_pretrained(paths["mixtral"])
    return paths


@pytest.fixture(params=["qwen3", "llama", "gpt2", "qwen3_moe", "mixtral"])
def path(request: pytest.FixtureRequest, experts: dict[str, Path]) -> Path:
    return experts.get(request.param) or request.getfixturevalue(request.param)


def test_one_file_is_byte_for_byte_that_of_transformers(path: Path, tmp_path: Path) -> None:
    model = load_model(path, "float32", "cpu", trust_remote_code=False)
    model.save_pretrained(tmp_path / "theirs")
    export(model, path, tmp_path / "ours")
    theirs = {each.name: each.read_bytes() for each in (tmp_path / "theirs").iterdir()}
    ours = {each.name: each.read_bytes() for each in (tmp_path / "ours").iterdir()}
    assert "model.safetensors" in theirs
    assert {name: ours[name] for name in theirs} == theirs


def test_several_files_are_loaded_by_transformers_and_one_is_held_at_a_time(
    path: Path, tmp_path: Path
) -> None:
    model = load_model(path, "float32", "cpu", trust_remote_code=False)
    held = HeldBytes()
    export(model, path, tmp_path / "several", BOUND, held)
    files = list((tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 4
    largest = max(each.nbytes for _, each in iterate_weights(model))
    assert held.most <= max(BOUND, largest) + largest
    assert held.most < sum(each.nbytes for _, each in iterate_weights(model)) / 2
    total = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())["metadata"]
    assert total["total_size"] == sum(each.nbytes for _, each in iterate_weights(model))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "several").state_dict()
    for name, each in iterate_weights(model):
        assert torch.equal(again[name], each)


def test_weights_that_are_not_all_there_are_not_exported(qwen3: Path, tmp_path: Path) -> None:
    model = load_model(qwen3, "float32", "cpu", trust_remote_code=False)
    weights = dict(iterate_weights(model))
    weights.popitem()
    with pytest.raises(ValueError, match="shorter"):
        save_model(weights.items(), model, torch.float32, tmp_path / "model", qwen3, SingleRank())
    assert not list(tmp_path.iterdir())


class HeldBytes:
    """Makes copies of weights; knows the most bytes of them that were held when one was made."""

    most = 0

    def copies(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        made = list["weakref.ref[NDArray[np.float32]]"]()
        for name, each in iterate_weights(model):
            self.most = max(self.most, sum(map(nbytes_of, made)))
            memory = each.numpy().copy()  # kept by every tensor that lies in it
            made.append(weakref.ref(memory))
            copy = torch.from_numpy(memory)
            del memory
            yield name, copy
            del copy


def nbytes_of(reference: "weakref.ref[NDArray[np.float32]]") -> int:
    held = reference()
    return 0 if held is None else held.nbytes


def export(
    model: PreTrainedModel,
    like: Path,
    target: Path,
    file_bytes: int = 2**30,
    held: HeldBytes | None = None,
) -> None:
    weights = (held or HeldBytes()).copies(model)
    save_model(weights, model, torch.float32, target, like, SingleRank(), file_bytes=file_bytes)


# --- several ranks --------------------------------------------------------------------------------

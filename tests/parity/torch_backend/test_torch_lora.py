"""Adapters over one and two ranks: the same step, states that both load, the same exports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import BOUND, Cut, Step
from safetensors.torch import load_file
from world import World

pytest.importorskip("peft", reason="the extra `lora` is not installed")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_two_ranks_train_adapters_as_one_does_and_go_on_from_its_state(
    world: World, models: Callable[[str], Path], step: Step, tmp_path: Path, dtype: str
) -> None:
    given: dict[str, Any] = {"path": models("qwen3"), "cut": Cut(dtype=dtype), "step": step}
    (one,) = world.run(1, "lora_jobs:trained", root=tmp_path / "one", **given)
    two, other = world.run(2, "lora_jobs:trained", root=tmp_path / "two", **given)
    assert two["initial"] == other["initial"] == one["initial"] == one["after reset"]
    assert two["digest"] == other["digest"] and two["after reset"] == one["initial"]
    assert two["identity"] == one["identity"]
    assert two["reference gap"] == other["reference gap"] == one["reference gap"] == 0
    assert two["frozen"] == one["frozen"] == {f"torch.{dtype}"}
    bound = BOUND if dtype == "float64" else 0.02
    assert two["result"].grad_norm == pytest.approx(one["result"].grad_norm, rel=bound)
    assert two["adapters"].keys() == one["adapters"].keys()
    files = [load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "two")]
    for name, each in files[0].items():
        assert torch.allclose(each, files[1][name], rtol=bound, atol=bound)
    load = tmp_path / "one" / "state"
    for seen in world.run(2, "lora_jobs:trained", load=load, root=tmp_path / "on", **given):
        assert seen["loaded"] == one["digest"]
        assert seen["result"].applied

"""Frozen parameters over one and two ranks: the same step, and states that both load."""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from freeze_jobs import FROZEN
from parity_cases import BOUND, Cut, Step, worst_relative_error
from world import World


@pytest.mark.parametrize("tensor", [1, 2], ids=["data", "tensor"])
@pytest.mark.parametrize(
    ("dtype", "recompute"), [("float64", False), ("bfloat16", True)], ids=["float64", "bfloat16"]
)
def test_two_ranks_freeze_as_one_does_and_go_on_from_its_state(
    world: World,
    models: Callable[[str], Path],
    step: Step,
    tmp_path: Path,
    dtype: str,
    recompute: bool,
    tensor: int,
) -> None:
    cut = Cut(dtype=dtype, recompute=recompute)
    given: dict[str, Any] = {"path": models("qwen3"), "cut": cut, "step": step}
    (one,) = world.run(1, "freeze_jobs:trained", root=tmp_path / "one", **given)
    given["cut"] = replace(cut, tensor=tensor)
    two, other = world.run(2, "freeze_jobs:trained", root=tmp_path / "two", **given)
    trained = {n for n in one["weights"] if not any(fnmatchcase(n, each) for each in FROZEN)}
    for seen in (one, two, other):
        assert seen["moved"] == seen["moments"] == trained
        assert seen["frozen"] == {f"torch.{dtype}"}
        assert seen["identity"] == one["identity"]
        assert seen["initial"] == seen["after reset"] == one["initial"]
        assert seen["resharded"]
    assert two["digest"] == other["digest"]
    bound = BOUND if dtype == "float64" else 0.02
    assert two["result"].grad_norm == pytest.approx(one["result"].grad_norm, rel=bound)
    if dtype == "float64":
        assert one["gradients"].keys() == trained
        assert worst_relative_error(two["gradients"], one["gradients"]) <= BOUND
    load = tmp_path / "one" / "state"
    for seen in world.run(2, "freeze_jobs:trained", load=load, root=tmp_path / "on", **given):
        assert seen["loaded"] == one["digest"]
        assert seen["moved"] == trained

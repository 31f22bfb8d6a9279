"""Frozen parameters over one and two ranks: the same step, and states that both load."""

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from freeze_jobs import FROZEN
from parity_cases import BALANCED, BOUND, SEVERAL, TOKENS, Cut, Step, worst_relative_error
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


@pytest.mark.parametrize(
    ("ranks", "tensor"), [(2, 1), (2, 2), (4, 2)], ids=["data", "tensor", "both"]
)
def test_several_optimizer_steps_over_ranks_leave_what_is_frozen_and_are_those_of_one(
    world: World, models: Callable[[str], Path], step: Step, ranks: int, tensor: int
) -> None:
    given: dict[str, Any] = {"path": models("qwen3"), "step": step, "loss": SEVERAL}
    ((one, moved),) = world.run(1, "freeze_jobs:stepped", cut=Cut(), **given)
    trained = {n for n in one.weights if not any(fnmatchcase(n, each) for each in FROZEN)}
    assert moved == trained
    for got, moved_there in world.run(
        ranks, "freeze_jobs:stepped", cut=Cut(tensor=tensor), **given
    ):
        assert moved_there == trained
        assert got.result.grad_norm == pytest.approx(one.result.grad_norm, rel=BOUND)
        assert got.result.metrics == pytest.approx(one.result.metrics, rel=BOUND)
        assert worst_relative_error(got.weights, one.weights) <= BOUND


def test_over_two_ranks_a_frozen_router_keeps_its_bias_while_others_are_balanced(
    world: World, models: Callable[[str], Path], step: Step
) -> None:
    cut = Cut(moe=BALANCED)
    given: dict[str, Any] = {"path": models("glm4-moe"), "cut": cut, "step": step}
    given["loss"] = replace(TOKENS, minibatches=2, epochs=2)
    (one,) = world.run(1, "freeze_jobs:balanced_steps", **given)
    ((start, _),) = world.run(1, "torch_jobs:initial", path=models("glm4-moe"), cut=cut)
    bias = "model.layers.{}.mlp.gate.e_score_correction_bias"
    for outcomes in world.run(2, "freeze_jobs:balanced_steps", **given):
        for got, want in zip(outcomes, one, strict=True):
            assert worst_relative_error(got.weights, want.weights) <= BOUND
        last = outcomes[-1].weights
        assert (last[bias.format(1)] == start[bias.format(1)]).all()
        assert (last[bias.format(2)] != start[bias.format(2)]).any()

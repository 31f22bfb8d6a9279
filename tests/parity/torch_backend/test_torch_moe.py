"""Balance of experts over two ranks: routers' losses, shares and moved biases are those of one rank."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from parity_cases import BALANCED, BOUND, TOKENS, Arrays, Cut, Outcome, Step, worst_relative_error
from world import World

from offbeat.config.loss_spec import LossSpec

Models = Callable[[str], Path]
MINIBATCHES = replace(TOKENS, minibatches=2)


@pytest.mark.parametrize("loss", [TOKENS, MINIBATCHES], ids=["one update", "two updates"])
def test_balanced_steps_of_two_ranks_are_those_of_one(
    world: World, models: Models, step: Step, loss: LossSpec
) -> None:
    given = {"path": models("glm4-moe"), "cut": Cut(moe=BALANCED), "step": step, "loss": loss}
    (alone,) = world.run(1, "torch_jobs:balanced", **given)
    for together in world.run(2, "torch_jobs:balanced", **given):
        for got, want in zip(together, alone, strict=True):
            assert got.result.grad_norm == pytest.approx(want.result.grad_norm, rel=BOUND)
            assert worst_relative_error(got.weights, want.weights) <= BOUND
            assert of_moe(got) == pytest.approx(of_moe(want), rel=1e-6)
    assert moved(alone) == {"bias", "router"}


def of_moe(outcome: Outcome) -> dict[str, float]:
    found = {n: value for n, value in outcome.result.metrics.items() if n.startswith("moe/")}
    assert len(found) == 4
    return found


def moved(outcomes: Sequence[Outcome]) -> set[str]:
    """Return which parts of the routers differ between the first step and the last."""
    first, last = outcomes[0].weights, outcomes[-1].weights
    names = {"bias": "e_score_correction_bias", "router": "mlp.gate.weight"}
    return {kind for kind, ending in names.items() if differs(first, last, ending)}


def differs(first: Arrays, last: Arrays, ending: str) -> bool:
    found = [name for name in first if name.endswith(ending)]
    assert found
    return any((first[name] != last[name]).any() for name in found)

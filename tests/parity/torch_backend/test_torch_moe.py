"""Balance of experts over two ranks: routers' losses, shares and moved biases are those of one rank."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_cases import (
    BALANCED,
    BOUND,
    CHUNKS,
    SEQUENCES,
    TOKENS,
    Arrays,
    Cut,
    Outcome,
    Step,
    worst_relative_error,
)
from world import World

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig

Models = Callable[[str], Path]
MINIBATCHES = replace(TOKENS, minibatches=2)
PLAIN = {
    "tokens": LossSpec(),
    "sequences": SEQUENCES,
    "constant": LossSpec(ClippedPgLossConfig(normalize="constant", constant_tokens=9)),
}
BRANCHES = np.array([0, 0, 1, 2], np.int32)


@pytest.mark.parametrize("cut", [Cut(), Cut(recompute=True)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("model", ["moe", "glm4-moe"])
@pytest.mark.parametrize("normalize", PLAIN)
def test_tokens_weigh_in_the_losses_of_routers_what_they_weigh_in_the_policy_loss(
    world: World, models: Models, step: Step, normalize: str, model: str, cut: Cut
) -> None:
    agents = [{**each, "branch_samples": BRANCHES} for each in step.groups[:2]]
    branched = Step(agents + step.groups[2:], [(1.0, -1.0, 2.0)] * 2 + step.advantages[2:])
    cut = replace(cut, moe={**BALANCED, "bias_update_rate": 0.0})
    given: dict[str, Any] = {"path": models(model), "cut": cut, "step": branched}
    given["loss"] = PLAIN[normalize]
    (want,) = world.run(1, "moe_jobs:plainly", **given)
    for ranks in (1, 2):
        for seen, shares in world.run(ranks, "moe_jobs:of_routers", chunks=CHUNKS, **given):
            assert np.abs(shares["shares"] - 0.25).max() > 0.01, "else nothing is to be balanced"
            for got in seen.values():
                assert worst_relative_error(got, want) <= BOUND


@pytest.mark.parametrize(
    "loss", [TOKENS, MINIBATCHES, SEQUENCES], ids=["one update", "two updates", "by sequences"]
)
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
    assert len(found) == 6
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

"""Mistakes in the balance, routing, positions and places of layers that other systems have had are seen."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep, apart
from megatron_world import MegatronWorld
from parity_cases import BOUND, TOKENS, Arrays, Cut, Step, worst_relative_error
from parity_cases import MegatronCut as Ranks
from world import World

Models = Callable[[str], Path]
SEEN = 0.1
LOSSES_OF_ROUTERS = {"load_balancing_coef": 0.5, "z_loss_coef": 0.1}
STILL = {"learning_rate": 1e-16}
"""With it the second step is as the first, but for the shares of the experts."""


@pytest.fixture(scope="module")
def torch_gradients(world: World, models: Models, step: Step) -> Callable[..., Arrays]:
    """Gradients that the torch trainer has on one rank in any step but the first."""

    def of(model: str, moe: Mapping[str, float]) -> Arrays:
        given = {"path": models(model), "step": step, "loss": TOKENS}
        cut = Cut(moe=dict(moe), optimizer=STILL)
        ((*_, last),) = world.run(1, "torch_backend.torch_jobs:balanced", cut=cut, **given)
        sums = apart(last.gradients[2])
        return {name: each / last.result.tokens for name, each in sums.items()}

    return of


@pytest.mark.parametrize(
    ("bug", "model", "cut"),
    [
        ("OwnFractions", "moe", Ranks(moe=LOSSES_OF_ROUTERS)),
        ("LossPerRank", "glm4-moe", Ranks(tensor=2, sequence=True, moe=LOSSES_OF_ROUTERS)),
        ("LossPerRank", "glm4-moe", Ranks(context=2, moe=LOSSES_OF_ROUTERS)),
        (
            "PaddingCounted",
            "moe",
            Ranks(shared_prompt=False, max_tokens=100, moe=LOSSES_OF_ROUTERS),
        ),
        ("OneScorePerGroup", "dots1", Ranks()),
        ("BiasInWeights", "glm4-moe", Ranks()),
        ("BiasForgotten", "glm4-moe", Ranks()),
        ("LibraryRope", "llama-llama3", Ranks()),
        ("EvenStages", "qwen3-3", Ranks(pipeline=2, stages=(2, 1))),
        ("SharedAsExperts", "glm4-moe", Ranks(tensor=2, expert=2, sequence=True)),
    ],
    ids=lambda each: (
        each if isinstance(each, str) else f"t{each.tensor}p{each.pipeline}c{each.context}"
    ),
)
def test_a_mistake_is_seen_where_the_same_layout_without_it_is_the_torch_trainers(
    megatron_world: MegatronWorld,
    models: Models,
    torch_gradients: Callable[..., Arrays],
    step: Step,
    bug: str,
    model: str,
    cut: Ranks,
) -> None:
    want = torch_gradients(model, cut.moe)
    given = {"path": models(model), "cut": replace(cut, optimizer=STILL), "count": 2}
    given["step"] = JobStep.of(step, TOKENS)
    right = megatron_world.run(cut.ranks, "planted", bug="Recording", **given)
    wrong = megatron_world.run(cut.ranks, "planted", bug=bug, **given)
    for each in right:
        assert worst_relative_error(each.gradients, want) <= BOUND
    for each in wrong:
        assert worst_relative_error(each.gradients, want) > SEEN, "unseen"

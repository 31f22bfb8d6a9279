"""Balance of experts: losses of routers and moved biases, beside the torch trainer's, in any cut and layout."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep, apart
from megatron_world import MegatronWorld
from parity_cases import (
    BALANCED,
    BOUND,
    EXPERT_LAYOUTS,
    LOSSES,
    SIGMOID_LAYOUTS,
    TOKENS,
    Arrays,
    Cut,
    Outcome,
    Step,
    worst_relative_error,
)
from parity_cases import MegatronCut as Ranks
from world import World

Models = Callable[[str], Path]
OF_MODELS = {
    "glm4-moe": BALANCED,
    "moe": {name: value for name, value in BALANCED.items() if name != "bias_update_rate"},
}
COUNT = 3
SOME_CHUNKS: list[tuple[str, str, Ranks, int]] = [
    *(("glm4-moe", name, cut, 2) for name, cut in SIGMOID_LAYOUTS.items()),
    ("glm4-moe", "one rank, 1 chunk", Ranks(), 1),
    ("glm4-moe", "one rank, 8 chunks", Ranks(), 8),
    ("glm4-moe", "one rank, recomputed", Ranks(recompute=True), 2),
    ("glm4-moe", "pp2, recomputed", Ranks(pipeline=2, stages=(2, 1), recompute=True), 8),
    ("glm4-moe", "one rank, padded", Ranks(shared_prompt=False, max_tokens=100), 2),
    ("moe", "ep2", EXPERT_LAYOUTS["experts, ep2"], 8),
    ("moe", "tp2", EXPERT_LAYOUTS["experts, tp2 x etp2, sequence"], 2),
]
OTHER_CHUNKS: list[tuple[str, str, Ranks, int]] = [
    ("glm4-moe", f"{name}, {chunks} chunks", cut, chunks)
    for name, cut in SIGMOID_LAYOUTS.items()
    if cut.ranks > 1
    for chunks in (1, 8)
]
CASES: list[tuple[str, str, Ranks, int, str]] = [
    *((*case, loss) for case in SOME_CHUNKS for loss in LOSSES),
    *((*case, "tokens") for case in OTHER_CHUNKS),
]


@pytest.fixture(scope="module")
def balanced(world: World, models: Models, step: Step) -> Callable[..., Sequence[Outcome]]:
    """Three steps of the torch trainer in one chunk each, and the weights before them."""
    made = dict[tuple[str, str], Sequence[Outcome]]()

    def of(model: str, loss: str = "tokens") -> Sequence[Outcome]:
        if (model, loss) not in made:
            cut = Cut(moe=OF_MODELS[model])
            given = {"path": models(model), "cut": cut, "step": step, "loss": LOSSES[loss]}
            (steps,) = world.run(1, "torch_backend.torch_jobs:trained", count=COUNT, **given)
            made[model, loss] = steps
        return made[model, loss]

    return of


@pytest.mark.parametrize(
    ("model", "cut", "chunks", "loss"),
    [(model, *case) for model, _, *case in CASES],
    ids=[f"{model}-{name}-{loss}" for model, name, _, _, loss in CASES],
)
def test_balanced_steps_are_those_of_the_torch_trainer(
    megatron_world: MegatronWorld,
    models: Models,
    balanced: Callable[..., Sequence[Outcome]],
    step: Step,
    model: str,
    cut: Ranks,
    chunks: int,
    loss: str,
) -> None:
    wanted = balanced(model, loss)
    given = {"path": models(model), "step": JobStep.of(step, LOSSES[loss]), "chunks": chunks}
    cut = replace(cut, moe=OF_MODELS[model])
    for outcomes in megatron_world.run(cut.ranks, "steps", cut=cut, count=COUNT, **given):
        for got, want in zip(outcomes, wanted, strict=True):
            assert got.in_step
            assert got.result.grad_norm == pytest.approx(want.result.grad_norm, rel=BOUND)
            assert worst_relative_error(got.weights, apart(want.weights)) <= BOUND
            assert of_moe(got.result.metrics) == pytest.approx(of_moe(want.result.metrics))


@pytest.mark.parametrize(
    "cut",
    [
        Ranks(data=2, expert=2),
        Ranks(pipeline=2, stages=(2, 1), recompute=True),
        Ranks(tensor=2, expert=2, sequence=True),
        Ranks(context=2, expert=2),
    ],
    ids=["ep2", "pp2, recomputed", "ep2 of tp2, sequence", "ep2 of cp2"],
)
def test_shares_and_biases_move_with_each_of_several_optimizer_steps(
    megatron_world: MegatronWorld, world: World, models: Models, step: Step, cut: Ranks
) -> None:
    path, loss = models("glm4-moe"), replace(LOSSES["sequences"], minibatches=3, epochs=2)
    given = {"path": path, "cut": Cut(moe=BALANCED), "step": step, "loss": loss}
    (wanted,) = world.run(1, "torch_backend.torch_jobs:balanced", **given)
    given = {"path": path, "step": JobStep.of(step, loss), "chunks": 2, "count": COUNT}
    for outcomes in megatron_world.run(2, "steps", cut=replace(cut, moe=BALANCED), **given):
        for got, want in zip(outcomes, wanted, strict=True):
            assert got.in_step
            assert got.result.grad_norm == pytest.approx(want.result.grad_norm, rel=BOUND)
            assert worst_relative_error(got.weights, apart(want.weights)) <= BOUND
            assert of_moe(got.result.metrics) == pytest.approx(of_moe(want.result.metrics))


def of_moe(metrics: dict[str, float]) -> dict[str, float]:
    found = {name: value for name, value in metrics.items() if name.startswith("moe/")}
    assert len(found) == 6
    return found


def test_the_losses_and_the_rate_each_change_the_steps(
    megatron_world: MegatronWorld,
    models: Models,
    balanced: Callable[..., Sequence[Outcome]],
    step: Step,
) -> None:
    want = apart(balanced("glm4-moe")[-1].weights)
    given = {"path": models("glm4-moe"), "step": JobStep.of(step, TOKENS), "count": COUNT}
    for name in BALANCED:
        less = {other: value for other, value in BALANCED.items() if other != name}
        ((*_, last),) = megatron_world.run(1, "steps", cut=Ranks(moe=less), **given)
        assert worst_relative_error(last.weights, want) > 1e-4, name


def test_a_step_that_is_given_up_counts_nothing(
    megatron_world: MegatronWorld, models: Models, step: Step
) -> None:
    cut = Ranks(data=2, expert=2, moe=BALANCED)
    job_step, path = JobStep.of(step, TOKENS), models("glm4-moe")
    for disturbed, plain in megatron_world.run(2, "aborted", path=path, cut=cut, step=job_step):
        assert same(disturbed.weights, plain.weights)
        assert disturbed.result.metrics == plain.result.metrics


def same(got: Arrays, want: Arrays) -> bool:
    return all(np.array_equal(got[name], want[name]) for name in want)

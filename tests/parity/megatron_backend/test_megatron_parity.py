"""megatron-core's step against the torch trainer's, over gloo worlds of 1, 2 and 4 ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep, Told
from megatron_world import MegatronWorld
from parity_cases import (
    BOUND,
    CHUNKS,
    EXPERT_LAYOUTS,
    FAMILY_CASES,
    GROUP_LAYOUTS,
    LAYOUTS,
    LOSSES,
    MEGATRON_CASES,
    SEVERAL,
    SHARED_LAYOUTS,
    SIGMOID_LAYOUTS,
    TIED_LAYOUTS,
    TOKENS,
    UNEVEN_LAYOUTS,
    Cut,
    Outcome,
    Step,
    rowed,
    worst_relative_error,
)
from parity_cases import MegatronCut as Ranks
from parity_table import ParityTable
from world import World

Models = Callable[[str], Path]
TorchStep = Callable[..., Told]


@pytest.fixture
def compare(
    megatron_world: MegatronWorld,
    models: Models,
    step: Step,
    torch_step: TorchStep,
    parity_table: ParityTable,
) -> Callable[..., None]:
    """One layout in every number of chunks beside the torch trainer; a row of the page."""

    def run(layout: str, cut: Ranks, model: str, loss: str, rows: str = "packed") -> None:
        spec = LOSSES[loss]
        want = torch_step(spec, model)
        replies = megatron_world.run(
            cut.ranks,
            "split",
            path=models(model),
            cut=cut,
            step=JobStep.of(step, spec),
            chunks=CHUNKS,
        )
        for outcomes in replies:
            for count, each in zip(CHUNKS, outcomes, strict=True):
                error = worst_relative_error(each.gradients, want.gradients)
                parity_table.add("megatron", layout, loss, count, error, rows)
            check(outcomes, want)

    return run


def check(outcomes: Sequence[Told], want: Told) -> None:
    for each in outcomes:
        assert each.in_step, "replicas or tied copies differ"
        assert worst_relative_error(each.gradients, want.gradients) <= BOUND
        got, wanted = each.result, want.result
        assert (got.applied, got.tokens, got.sequences) == (True, wanted.tokens, wanted.sequences)
        assert got.loss == pytest.approx(wanted.loss, rel=BOUND)
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=BOUND)
        assert got.learning_rate == wanted.learning_rate
        assert got.metrics == pytest.approx(wanted.metrics, rel=1e-6)


@pytest.mark.parametrize(("layout", "rows", "loss"), MEGATRON_CASES)
def test_a_step_in_any_chunks_under_any_layout_is_the_torch_trainers(
    compare: Callable[..., None], layout: str, rows: str, loss: str
) -> None:
    compare(layout, rowed(LAYOUTS[layout], rows), "qwen3", loss, rows)


def test_a_step_with_branches_is_the_torch_trainers_on_replicas_of_two_ranks(
    megatron_world: MegatronWorld, world: World, models: Models, step: Step
) -> None:
    loss, path = LOSSES["sequences"], models("qwen3")
    branched = step_with_branches(step)
    given = {"path": path, "step": branched, "chunks": (1,)}
    (want,) = world.run(1, "torch_backend.torch_jobs:split", cut=Cut(), loss=loss, **given)
    given["step"] = JobStep.of(branched, loss)
    replies = megatron_world.run(4, "split", cut=LAYOUTS["tp2 x dp2"], **given)
    for (outcome,) in replies:
        assert outcome.result.sequences == sum(map(len, branched.advantages))
        assert outcome.result.loss == pytest.approx(want.result.loss, rel=BOUND)
        assert outcome.result.grad_norm == pytest.approx(want.result.grad_norm, rel=BOUND)


def step_with_branches(step: Step) -> Step:
    """The groups of a step, of which the first two rows are branches of one sample."""
    groups = [dict(group) for group in step.groups]
    for group in groups:
        rows = np.arange(len(group["response_offsets"]) - 1)
        group["branch_samples"] = np.maximum(rows - 1, 0).astype(np.int32)
    return Step(groups, [advantages[1:] for advantages in step.advantages])


@pytest.mark.parametrize("layout", TIED_LAYOUTS)
def test_a_tied_embedding_on_two_stages_is_one_weight(
    compare: Callable[..., None], layout: str
) -> None:
    compare(layout, TIED_LAYOUTS[layout], "qwen3-tied", "tokens")


@pytest.mark.parametrize("layout", UNEVEN_LAYOUTS)
def test_stages_may_have_different_numbers_of_layers(
    compare: Callable[..., None], layout: str
) -> None:
    compare(layout, UNEVEN_LAYOUTS[layout], "qwen3-3", "tokens")


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_train_as_in_the_torch_trainer(compare: Callable[..., None], layout: str) -> None:
    compare(layout, EXPERT_LAYOUTS[layout], "moe", "tokens")


@pytest.mark.parametrize("layout", SHARED_LAYOUTS)
def test_shared_experts_and_layers_without_experts_train_as_in_the_torch_trainer(
    compare: Callable[..., None], layout: str
) -> None:
    compare(layout, SHARED_LAYOUTS[layout], "qwen2-moe", "tokens")


@pytest.mark.parametrize("layout", SIGMOID_LAYOUTS)
def test_a_router_with_sigmoid_scores_and_a_bias_trains_as_in_the_torch_trainer(
    compare: Callable[..., None], layout: str
) -> None:
    compare(layout, SIGMOID_LAYOUTS[layout], "glm4-moe", "tokens")


@pytest.mark.parametrize("layout", GROUP_LAYOUTS)
def test_experts_of_the_best_groups_are_those_of_the_torch_trainer(
    compare: Callable[..., None], layout: str
) -> None:
    compare(layout, GROUP_LAYOUTS[layout], "dots1", "tokens")


@pytest.mark.parametrize("cut", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_split_step_and_the_single_shot_move_the_weights_alike(
    megatron_world: MegatronWorld, models: Models, step: Step, cut: Ranks
) -> None:
    given = {"path": models("qwen3"), "cut": cut, "step": JobStep.of(step, TOKENS)}
    singles = megatron_world.run(cut.ranks, "single", **given)
    splits = megatron_world.run(cut.ranks, "split", chunks=(3,), **given)
    for one, (several,) in zip(singles, splits, strict=True):
        check([several], one)
        assert worst_relative_error(several.weights, one.weights) <= BOUND


@pytest.mark.parametrize(
    "cut",
    [
        Ranks(data=2),
        Ranks(data=2, overlap=True),
        Ranks(pipeline=2, recompute=True),
        Ranks(context=2),
        Ranks(tensor=2, sequence=True),
    ],
    ids=["dp2", "dp2, overlap", "pp2, recomputed", "cp2", "tp2, sequence"],
)
def test_several_optimizer_steps_are_those_of_the_torch_trainer(
    megatron_world: MegatronWorld, world: World, models: Models, step: Step, cut: Ranks
) -> None:
    path = models("qwen3")
    given = {"path": path, "cut": Cut(), "step": step, "loss": SEVERAL}
    (want,) = world.run(1, "torch_backend.torch_jobs:single", **given)
    given = {"path": path, "cut": cut, "step": JobStep.of(step, SEVERAL), "chunks": (3,)}
    for (got,) in megatron_world.run(2, "split", **given):
        assert got.in_step, "replicas differ"
        assert got.result.tokens == want.result.tokens
        assert got.result.loss == pytest.approx(want.result.loss, rel=BOUND)
        assert got.result.grad_norm == pytest.approx(want.result.grad_norm, rel=BOUND)
        assert worst_relative_error(got.weights, want.weights) <= BOUND


@pytest.mark.parametrize(
    ("layout", "rows", "model", "cut"), FAMILY_CASES, ids=[case[0] for case in FAMILY_CASES]
)
def test_every_family_trains_alike(
    compare: Callable[..., None], layout: str, rows: str, model: str, cut: Ranks
) -> None:
    compare(layout, rowed(cut, rows), model, "tokens", rows)


# Without a large eps, Adam's first steps are signs of the gradient: they would hide its scale.
WARM_UP = {
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "schedule": "linear",
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "eps": 1e-2,
}


@pytest.fixture(scope="module")
def three_steps(world: World, models: Models, step: Step) -> list[Outcome]:
    """What the torch trainer makes of three clipped steps of a warm-up."""
    (outcomes,) = world.run(
        1,
        "torch_backend.torch_jobs:trained",
        path=models("qwen3-tied"),
        cut=Cut(optimizer=WARM_UP),
        step=step,
        loss=TOKENS,
        count=3,
    )
    assert outcomes[0].result.grad_norm > 0.5, "nothing was clipped"
    return outcomes


@pytest.mark.parametrize(
    "cut",
    [Ranks(tensor=2, data=2), Ranks(tensor=2, sequence=True), Ranks(pipeline=2)],
    ids=["t2d2", "t2-sequence", "p2"],
)
def test_three_clipped_steps_of_a_warm_up_end_at_the_torch_trainers_weights(
    megatron_world: MegatronWorld,
    models: Models,
    step: Step,
    three_steps: list[Outcome],
    cut: Ranks,
) -> None:
    for outcomes in megatron_world.run(
        cut.ranks,
        "steps",
        path=models("qwen3-tied"),
        cut=replace(cut, optimizer=WARM_UP),
        step=JobStep.of(step, TOKENS),
        count=3,
    ):
        for got, want in zip(outcomes, three_steps, strict=True):
            assert got.result.learning_rate == want.result.learning_rate
            assert got.result.grad_norm == pytest.approx(want.result.grad_norm, rel=BOUND)
            assert got.in_step
        assert worst_relative_error(outcomes[-1].weights, three_steps[-1].weights) <= BOUND

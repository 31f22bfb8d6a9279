"""A step that fails anywhere leaves nothing behind, and the known ways to be wrong are seen."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra megatron")

from megatron_cases import JobStep, Told
from megatron_world import MegatronWorld
from parity_cases import TOKENS, Step, worst_relative_error
from parity_cases import MegatronCut as Cut

from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.trainers.model_trainer import learning_rate

Models = Callable[[str], Path]
TorchStep = Callable[..., Told]
TIGHT = 1e-12
IN_A_CHUNK = ("no_sync", "forward", "backward", "loss")
OBJECTIONS = {
    "NoSyncLeaked": "step 2: Should not have multiple communication calls outstanding at once",
    "NoSyncHookLeft": "step 2: Should not have multiple communication calls outstanding at once",
}
"""What the library itself says to a bug. In its first step it only counts, and nothing is seen."""
AT_THE_END = ("scale", "finalize", "synchronize", "grad_norm", "step")


@pytest.mark.parametrize("site", IN_A_CHUNK)
@pytest.mark.parametrize(
    ("cut", "ranks"),
    [(Cut(data=2), (0,)), (Cut(tensor=2), (0, 1)), (Cut(data=2, overlap=True), (1,))],
    ids=["data2", "tensor2", "data2-overlap"],
)
def test_a_chunk_that_fails_can_be_aborted_and_the_step_tried_again(
    megatron_world: MegatronWorld,
    models: Models,
    torch_step: TorchStep,
    step: Step,
    site: str,
    cut: Cut,
    ranks: tuple[int, ...],
) -> None:
    path, job_step = models("qwen3"), JobStep.of(step, TOKENS)
    want = torch_step(TOKENS, "qwen3")
    everywhere = (0, 1) if site == "loss" else ranks
    replies = megatron_world.run(
        cut.ranks, "fault", path=path, cut=cut, step=job_step, site=site, failing=everywhere
    )
    for rank, (raised, changed, again) in enumerate(replies):
        assert bool(raised) == (rank in everywhere)
        assert changed == []
        assert worst_relative_error(again.gradients, want.gradients) <= TIGHT


def test_a_pipeline_that_fails_midway_asks_for_new_processes(
    megatron_world: MegatronWorld, models: Models, step: Step
) -> None:
    path, cut, job_step = models("qwen3"), Cut(pipeline=2), JobStep.of(step, TOKENS)
    for raised, changed in megatron_world.run(
        2, "pipeline_fault", path=path, cut=cut, step=job_step
    ):
        assert raised.startswith("WorldBroken")
        assert "Injected: no_sync" in raised
        assert changed == []


@pytest.mark.parametrize("site", AT_THE_END)
@pytest.mark.parametrize(
    "cut", [Cut(data=2), Cut(pipeline=2), Cut(tensor=2, data=2)], ids=["d2", "p2", "t2d2"]
)
def test_a_finish_that_fails_before_the_update_can_be_tried_again(
    megatron_world: MegatronWorld,
    models: Models,
    torch_step: TorchStep,
    step: Step,
    site: str,
    cut: Cut,
) -> None:
    path, job_step = models("qwen3-tied"), JobStep.of(step, TOKENS)
    want = torch_step(TOKENS, "qwen3-tied")
    for raised, changed, again in megatron_world.run(
        cut.ranks, "fault", path=path, cut=cut, step=job_step, site=site, failing=range(cut.ranks)
    ):
        assert raised == f"Injected: {site}"
        assert changed == []
        assert worst_relative_error(again.gradients, want.gradients) <= TIGHT


def test_a_finish_that_fails_around_its_overlapped_reduction_can_be_tried_again(
    megatron_world: MegatronWorld, models: Models, torch_step: TorchStep, step: Step
) -> None:
    path, job_step = models("qwen3"), JobStep.of(step, TOKENS)
    cut = Cut(data=2, overlap=True)
    want = torch_step(TOKENS, "qwen3")
    for site in ("start", "finalize", "synchronize"):  # before, while and after it is under way
        for raised, changed, again in megatron_world.run(
            2, "fault", path=path, cut=cut, step=job_step, site=site, failing=(0, 1)
        ):
            assert (raised, changed) == (f"Injected: {site}", [])
            assert worst_relative_error(again.gradients, want.gradients) <= TIGHT


@pytest.mark.parametrize(
    ("bug", "model", "cut"),
    [
        ("ReducedTwice", "qwen3-tied", Cut(data=2)),
        ("FinalizeHookLeft", "qwen3-tied", Cut(data=2)),
        ("FinalizeHookLeft", "qwen3-tied", Cut(tensor=2)),
        ("NoSyncLeaked", "qwen3-tied", Cut(data=2, overlap=True)),
        ("NoSyncHookLeft", "qwen3-tied", Cut(data=2, overlap=True)),
        ("Averaged", "qwen3-tied", Cut(data=2)),
        ("NormsNotAdded", "qwen3-tied", Cut(tensor=2, sequence=True)),
        ("OwnKeysOnly", "qwen3-tied", Cut(context=2)),
        ("CountedPerContextRank", "qwen3-tied", Cut(context=2)),
        ("ExpertsAsDense", "moe", Cut(tensor=2, sequence=True)),
    ],
    ids=lambda each: (
        each if isinstance(each, str) else f"d{each.data}t{each.tensor}c{each.context}"
    ),
)
def test_the_parity_tests_see_each_known_bug(
    megatron_world: MegatronWorld,
    models: Models,
    torch_step: TorchStep,
    step: Step,
    bug: str,
    model: str,
    cut: Cut,
) -> None:
    # Six groups: ranks with unequal work would wait for ever instead.
    path, job_step = models(model), JobStep.of(step, TOKENS, groups=6)
    want = torch_step(TOKENS, model, groups=6)
    still = replace(cut, optimizer={"learning_rate": 1e-16})  # the second step is as the first
    for got in megatron_world.run(
        2, "planted", path=path, cut=still, step=job_step, bug=bug, count=2
    ):
        if isinstance(got, Told):
            assert worst_relative_error(got.gradients, want.gradients) > 0.1, "unseen"
        else:
            assert got == OBJECTIONS[bug]


def test_without_a_bug_the_same_test_sees_nothing(
    megatron_world: MegatronWorld, models: Models, torch_step: TorchStep, step: Step
) -> None:
    path, job_step = models("qwen3-tied"), JobStep.of(step, TOKENS)
    want = torch_step(TOKENS, "qwen3-tied")
    for cut in (Cut(data=2), Cut(tensor=2), Cut(data=2, overlap=True), Cut(context=2)):
        still = replace(cut, optimizer={"learning_rate": 1e-16})
        for got in megatron_world.run(
            2, "planted", path=path, cut=still, step=job_step, bug="Recording", count=2
        ):
            assert worst_relative_error(got.gradients, want.gradients) <= TIGHT


def test_a_learning_rate_read_after_the_schedule_moved_is_seen(
    megatron_world: MegatronWorld, models: Models, step: Step
) -> None:
    options = {"learning_rate": 1e-2, "warmup_steps": 3}
    cut, job_step = Cut(optimizer=options), JobStep.of(step, TOKENS)
    rates = [learning_rate(OptimizerConfig.model_validate(options), n, 10) for n in range(3)]

    def reported(late: bool) -> list[float]:
        (outcomes,) = megatron_world.run(
            1, "steps", path=models("qwen3"), cut=cut, step=job_step, count=3, late=late
        )
        return [each.result.learning_rate for each in outcomes]

    assert reported(late=False) == rates
    assert reported(late=True) != rates


def test_a_step_without_a_valid_token_is_refused_on_every_rank(
    megatron_world: MegatronWorld, models: Models, step: Step
) -> None:
    groups, advantages = step.groups, step.advantages
    masked = [each | {"loss_mask": each["loss_mask"] & False} for each in groups]
    job_step, cut = JobStep(masked, advantages, TOKENS), Cut(data=2)
    for (refused,) in megatron_world.run(
        2, "split", path=models("qwen3"), cut=cut, step=job_step, chunks=(2,)
    ):
        assert not refused.result.applied
        assert refused.result.reason == "no valid tokens"
        assert refused.gradients == {}


def test_a_loss_or_a_gradient_that_is_not_finite_leaves_the_weights_alone(
    megatron_world: MegatronWorld, models: Models, step: Step
) -> None:
    groups, advantages = step.groups, step.advantages
    broken = [*advantages[:-1], (float("nan"), *advantages[-1][1:])]
    cut, path = Cut(data=2), models("qwen3")
    replies = megatron_world.run(
        2, "split", path=path, cut=cut, step=JobStep(groups, broken, TOKENS), chunks=(2,)
    )
    for (refused,) in replies:
        assert not refused.result.applied
        assert refused.result.reason == "loss is nan"
        assert refused.in_step

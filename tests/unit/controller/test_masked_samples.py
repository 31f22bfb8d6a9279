"""A run in which samples failed: what is trained, counted and told of them."""

import statistics
from typing import Any

from offbeat.algorithms.advantages import ESTIMATORS
from offbeat.controller.events import Dropped, Returned, StepApplied
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.groups import SampleFailure, SampleStatus
from offbeat.messages.training import Chunk, ChunkResult
from tests.support.fakes import FakeTrainer
from tests.support.world import World

FIRST_MASKED: dict[str, Any] = {
    "statuses": (SampleStatus.MASKED, SampleStatus.VALID, SampleStatus.VALID, SampleStatus.VALID),
    "failures": (SampleFailure.INFRASTRUCTURE, *[SampleFailure.NONE] * 3),
    "retries": (0, 0, 1, 0),
    "finish_reasons": ("deadline", "stop", "stop", "stop"),
    "valid_tokens": (0, 2, 2, 2),
    "rewards": (0.0, 1.0, 0.0, 0.5),
    "branches": (1, 1, 2, 1),
    "textless_tokens": 3,
    "refused_requests": (0, 5, 0, 1),
}
OF_FOUR: dict[str, Any] = {
    "samples_per_group": 4,
    "steps": 2,
    "groups_per_step": 2,
    "rollout": {"on_failed_sample": "retry"},
}


class Watched(FakeTrainer):
    """Keeps the advantages of every chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.advantages = dict[int, tuple[float, ...]]()

    async def train_microbatch(self, fence: Any, key: Any, chunk: Chunk) -> ChunkResult:
        self.advantages.update(zip(chunk.prompt_indices, chunk.advantages, strict=True))
        return await super().train_microbatch(fence, key, chunk)


def world(**changes: Any) -> World:
    return World(
        {**OF_FOUR, **changes},
        trainer=Watched(),
        prompts=FakePrompts(),
        advantages=ESTIMATORS["grpo_no_std"],
    )


def test_the_others_of_a_group_are_compared_as_if_the_masked_sample_were_not_there() -> None:
    run = world()
    run.rollouts.forged = {0: FIRST_MASKED}
    run.run()
    assert isinstance(run.trainer, Watched)
    assert run.trainer.advantages[0] == (0.0, 0.5, -0.5, 0.0)


def test_metrics_and_journal_count_valid_samples_and_tell_the_masked_ones_apart() -> None:
    run = world()
    run.rollouts.forged = {0: FIRST_MASKED}
    run.run()
    applied, first = run.events(StepApplied)[0], run.telemetry.records[0]
    assert 0 in applied.prompt_indices
    assert (applied.samples, applied.masked_samples) == (7, 1)
    assert sum(count for _, count in applied.staleness) == 7
    rewards = (1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 1.0)
    assert applied.reward == first["train/reward"] == statistics.fmean(rewards)
    assert first["rollout/response_tokens_mean"] == 2.0
    assert first["rollout/masked_fraction"] == 1 / 8
    assert first["rollout/late_fraction"] == 1 / 8
    assert first["rollout/retried_fraction"] == 1 / 8
    assert (first["rollout/branches_mean"], first["rollout/branched_fraction"]) == (9 / 8, 1 / 8)
    assert first["rollout/textless_fraction"] == 3 / sum(FIRST_MASKED["valid_tokens"] + (2,) * 4)
    summary = run.built.progress.summary("run", "finished", None)
    assert (summary.masked_samples, summary.refused_samples) == (1, 2)


def test_the_mean_of_a_named_reward_is_over_the_valid_samples_that_have_it() -> None:
    run = world()
    run.rollouts.forged = {
        0: {**FIRST_MASKED, "rewards_by_name": (("style", (0.0, 1.0, 2.0, 6.0)),)}
    }
    run.run()
    first, second = run.telemetry.records[:2]
    assert first["rewards/style"] == 3.0
    assert "rewards/style" not in second and "rewards_skipped/style" not in first


def test_a_named_reward_that_does_not_apply_is_no_part_of_its_mean_and_is_counted() -> None:
    run = world()
    run.rollouts.forged = {
        0: {**FIRST_MASKED, "rewards_by_name": (("style", (0.0, 1.0, None, 6.0)),)}
    }
    run.run()
    first = run.telemetry.records[0]
    assert first["rewards/style"] == 3.5
    assert first["rewards_skipped/style"] == 1 / 7


def test_a_group_with_fewer_valid_samples_than_required_never_gets_into_a_batch() -> None:
    run = world(
        rollout={
            "on_failed_sample": "mask",
            "min_valid_samples": 4,
            "drop_budget": 1,
            "data_retries": 0,
        }
    )
    run.rollouts.forged = {0: FIRST_MASKED}
    run.run()
    (returned,) = run.events(Returned)
    assert (returned.prompt_index, returned.reason) == (0, "refused_at_commit")
    assert [event.prompt_index for event in run.events(Dropped)] == [0]
    assert 0 not in run.trained


def test_trackers_get_the_valid_samples_with_their_advantages() -> None:
    run = world()
    run.rollouts.forged = {0: FIRST_MASKED}
    run.run()
    assert isinstance(run.trainer, Watched)
    first, _ = run.telemetry.samples
    of_masked = [row for row in first.rows if row.prompt_index == 0]
    assert [(row.sample, row.reward, row.advantage) for row in of_masked] == [
        (1, 1.0, 0.5),
        (2, 0.0, -0.5),
        (3, 0.5, 0.0),
    ]
    assert len(first.rows) == 7
    assert first.rewards is not None
    assert first.response_tokens is not None
    assert sum(first.rewards.counts) == sum(first.response_tokens.counts) == 7

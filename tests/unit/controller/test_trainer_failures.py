"""What a run does about a trainer that fails, is lost, or takes no step."""

import asyncio

import pytest

from offbeat.controller.errors import BudgetSpent
from offbeat.controller.events import Rewound, StepIntent
from offbeat.messages.failures import ActorLost, TrainerCall, TrainStepFailed
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import Chunk, ChunkResult, StepResult
from offbeat.messages.weights import WeightRelease
from tests.support.fakes import (
    FakeTrainer,
)
from tests.support.world import World, bad_data


@pytest.mark.parametrize("where", ["begin", "microbatch"])
def test_a_failed_step_is_aborted_and_tried_again_on_the_same_groups(where: str) -> None:
    world = World()
    world.trainer.fail_at = {3: [where]}
    world.run()
    world.assert_ledger_agrees()
    assert world.trainer.aborted == [3]
    assert len(world.trained) == 40


def test_a_step_that_keeps_failing_ends_the_run_with_its_own_error() -> None:
    world = World()
    world.trainer.fail_at = {3: ["microbatch"] * 5}
    failure = world.fail()
    assert "trainer rank 0 failed in microbatch of step 3: out of memory" in str(failure)
    assert world.built.state.ledger.trainer_version == 2


NO_RESTARTS = {"trainer": {"restart_budget": 0, "min_tokens_per_chunk": 1}}


def test_a_lost_trainer_without_a_budget_ends_the_run_with_one_typed_line() -> None:
    world = World(NO_RESTARTS)
    world.trainer.lose_at_step = 4
    failure = world.fail()
    assert isinstance(failure.causes[0], BudgetSpent)
    assert "trainer.restart_budget" in str(failure) and "process is gone" in str(failure)
    assert "\n" not in str(failure)
    assert world.trainer.closed and world.rollouts.closed


def test_a_lost_trainer_is_replaced_and_what_it_lost_is_trained_again() -> None:
    world = World({"checkpoint": {"interval": 3}})
    world.trainer.lose_at_step = 6
    world.run()
    world.assert_ledger_agrees()
    ledger = world.built.state.ledger
    assert (ledger.lineage, ledger.trainer_version, world.trainer.incarnation_number) == (1, 10, 2)
    rewound = next(event for event in world.journal.events if isinstance(event, Rewound))
    assert rewound.to_version == 3
    assert ledger.counts()["drawn"] == ledger.counts()["trained"] == 40
    assert ledger.totals.dropped == {}
    summary = world.built.progress.summary("run", "finished", None)
    assert sum(summary.staleness_histogram.values()) == 40 * 2  # what was undone counts once


def test_a_step_stays_reported_whose_trainer_is_lost_after_its_checkpoint_was_written() -> None:
    world = World({"checkpoint": {"interval": 3}})
    world.trainer.dies_after_saving = {3}
    world.run()
    reported = [int(record["step"]) for record in world.telemetry.records]
    kept = next(event for event in world.journal.events if isinstance(event, Rewound)).to_version
    assert reported == [1, 2, 3, *range(kept + 1, 11)]


def test_a_failed_finish_is_not_guessed_about_but_rewound() -> None:
    world = World({"checkpoint": {"interval": 2}})
    world.trainer.fail_at = {6: ["finish"]}
    world.run()
    world.assert_ledger_agrees()
    rewound = next(event for event in world.journal.events if isinstance(event, Rewound))
    assert rewound.to_version == 4 and "finish" in rewound.reason


def test_a_silent_trainer_is_replaced_at_its_deadline() -> None:
    world = World({"trainer": {"step_deadline_s": 50, "min_tokens_per_chunk": 1}})
    world.trainer.hang = True
    world.run()
    world.assert_ledger_agrees()
    assert world.trainer.incarnation_number == 2


def test_a_run_that_ends_for_want_of_engines_leaves_a_checkpoint_of_its_last_version() -> None:
    world = World({"generator": {"restart_budget": 1}}, engines=1)

    class Doomed(FakeTrainer):
        async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
            if len(self.steps) in (2, 5):
                world.generators["generator-0"].silent = True  # answers nothing any more
            return await super().finish_train_step(fence, key)

    world.trainer = Doomed()
    failure = world.fail()
    assert isinstance(failure.causes[0], BudgetSpent) and "restart_budget" in str(failure)
    assert list(world.trainer.checkpoints) == [world.built.state.ledger.trainer_version]


def test_a_checkpoint_that_cannot_be_written_costs_no_step() -> None:
    world = World({"checkpoint": {"interval": 2}})
    world.trainer.broken_disk = True
    world.run()
    world.assert_ledger_agrees()
    assert world.built.state.ledger.checkpoints == []


def test_a_step_not_applied_makes_no_version_and_no_sync() -> None:
    world = World({"rollout": {"drop_budget": 4}})
    world.trainer.refuse_steps = {3}
    world.run()
    world.assert_ledger_agrees()
    assert world.built.state.ledger.totals.dropped == {"step_not_applied": 4}
    assert world.generators["generator-0"].loads == list(range(11))


@pytest.mark.parametrize("on_dropped_prompt", ["replace", "shrink"])
def test_a_refused_step_at_the_end_of_the_prompts_trains_the_batch_of_the_next_one(
    on_dropped_prompt: str,
) -> None:
    world = World(
        {
            "sampler": {"name": "in_order", "max_staleness": 2},
            "rollout": {"on_dropped_prompt": on_dropped_prompt},
        }
    )
    world.prompts.count = 12
    world.trainer.refuse_steps = {2}
    world.run()
    assert [sorted(step) for step in world.trainer.steps] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert world.built.state.ledger.totals.dropped == {"step_not_applied": 4}


def test_a_step_that_was_refused_after_it_had_shrunk_is_tried_again_with_a_whole_batch() -> None:
    world = World(
        {
            "sampler": {"name": "in_order", "max_staleness": 1},
            "rollout": {"data_retries": 0, "drop_budget": 1, "on_dropped_prompt": "shrink"},
        }
    )
    world.rollouts.faults = {1: [bad_data(1)]}
    world.trainer.refuse_steps = {1}
    world.run()
    assert [sorted(step) for step in world.trainer.steps[:2]] == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_steps_not_applied_in_a_row_end_the_run_with_the_last_good_version() -> None:
    world = World({"trainer": {"max_steps_not_applied": 2}})

    class Diverged(FakeTrainer):
        async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
            self.refuse_steps = {3} if len(self.steps) == 2 else set()
            return await super().finish_train_step(fence, key)

    world.trainer = Diverged()
    failure = world.fail()
    assert isinstance(failure.causes[0], BudgetSpent)
    assert "last good version 2" in str(failure)


def test_the_intent_is_durable_before_finish_is_sent() -> None:
    world = World()

    class Careful(FakeTrainer):
        async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
            durable = world.journal.events[: world.journal.barriers[-1]]
            intents = [event.step for event in durable if isinstance(event, StepIntent)]
            assert key.step in intents
            return await super().finish_train_step(fence, key)

    world.trainer = Careful()
    world.run()


class LastsOn(FakeTrainer):
    """Loses the answer to one call, and then the process, in the step after it."""

    lost = False

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        if version == 3 and not self.lost:
            await asyncio.Event().wait()
        return await super().publish_weights(fence, version)

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        if key.step == 4 and not self.lost:
            self.lost = True
            raise ActorLost("trainer rank 0", "microbatch", "the process is gone")
        return await super().train_microbatch(fence, key, chunk)


def test_a_publish_of_before_a_rewind_that_fails_late_takes_no_release_with_it() -> None:
    settings = {"checkpoint": {"interval": 1}, "sync": {"deadline_s": 50}}
    world = World(settings, trainer=LastsOn())
    world.rollouts.slow = dict.fromkeys(range(14, 40), 20.0)  # step 4 needs the engines again
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40
    assert len(world.events(Rewound)) == 1


def test_a_trainer_that_cannot_abort_a_step_is_replaced() -> None:
    world = World({"checkpoint": {"interval": 1}})

    class Spoiled(FakeTrainer):
        async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
            if self.incarnation_number == 1:
                raise TrainStepFailed(0, key.step, TrainerCall.ABORT, "an illegal memory access")
            await super().abort_train_step(fence, key)

    world.trainer = Spoiled(fail_at={3: ["microbatch"]})
    world.run()
    world.assert_ledger_agrees()
    (rewound,) = world.events(Rewound)
    assert rewound.to_version == 2 and "abort of step 3" in rewound.reason

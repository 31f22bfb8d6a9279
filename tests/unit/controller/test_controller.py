"""The whole controller on fakes and a virtual clock."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from offbeat.controller.commands import Pause, Resume, Stop
from offbeat.controller.errors import BudgetSpent, RunAborted, RunFailed, RunStalled
from offbeat.controller.events import Dispatched, Rewound, StepIntent
from offbeat.controller.lifecycle import Phase
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import Checkpoint, LossSpec, StepResult
from offbeat.messages.weights import WeightRelease, WeightsAck
from tests.support.fakes import (
    FakeGenerator,
    FakePrompts,
    FakeRollouts,
    FakeTrainer,
)
from tests.support.virtual_time import run
from tests.support.world import IN_ORDER, READY_FIRST, World, bad_data, lost


@pytest.mark.parametrize("sampler", [READY_FIRST, IN_ORDER], ids=["ready_first", "in_order"])
def test_trains_every_step_within_the_bound_and_generates_nothing_beyond_need(
    sampler: dict[str, Any],
) -> None:
    world = World({"sampler": sampler})
    world.run()
    world.assert_books_agree()
    assert [len(step) for step in world.trainer.steps] == [4] * 10
    assert 1 <= world.worst_staleness() <= 2
    counts = world.built.state.ledger.counts()
    assert counts["drawn"] == counts["trained"] == 40
    assert world.built.state.lifecycle.phase is Phase.FINISHED
    assert all(generator.version == 10 for generator in world.generators.values())


@pytest.mark.parametrize("name", ["ready_first", "in_order"])
def test_a_bound_of_zero_is_synchronous(name: str) -> None:
    world = World({"sampler": {"name": name, "max_staleness": 0}})
    world.run()
    assert world.worst_staleness() == 0
    assert world.rollouts.peak <= 4
    assert not world.built.state.ledger.totals.evicted


def test_in_order_trains_the_prompts_in_order() -> None:
    world = World({"sampler": IN_ORDER})
    world.rollouts.slow = {1: 9.0, 5: 7.0}
    world.run()
    assert [sorted(step) for step in world.trainer.steps] == [
        list(range(4 * step, 4 * step + 4)) for step in range(10)
    ]


def test_ready_first_waits_for_its_oldest_straggler_rather_than_discarding_it() -> None:
    world = World()
    world.rollouts.slow = {0: 60.0}
    world.run()
    step_of_straggler = next(i for i, step in enumerate(world.trainer.steps) if 0 in step)
    assert step_of_straggler == 2, "the last step that may train a group of version 0"
    assert world.worst_staleness() == 2
    assert not world.built.state.ledger.totals.evicted


def test_the_end_of_the_prompts_trains_the_rest_and_ends_the_run() -> None:
    world = World(prompts=FakePrompts(count=10))
    world.run()
    assert sorted(world.trained) == list(range(10))
    assert [len(step) for step in world.trainer.steps] == [4, 4, 2]
    assert world.built.state.lifecycle.phase is Phase.FINISHED


def test_every_version_counts_when_syncs_are_rarer_than_steps() -> None:
    world = World({"sync": {"interval": 3}})
    world.run()
    world.assert_books_agree()
    assert world.worst_staleness() == 2
    assert world.generators["generator-0"].loads == [0, 3, 6, 9, 10]


def test_drain_swaps_weights_with_nothing_in_flight() -> None:
    world = World({"sync": {"mode": "drain"}})

    class Watched(FakeGenerator):
        async def load_weights(
            self, fence: Fence, epoch: int, release: WeightRelease
        ) -> WeightsAck:
            assert world.rollouts.running == 0
            return await super().load_weights(fence, epoch, release)

    world.generators.update({name: Watched(name) for name in world.generators})
    world.run()
    world.assert_books_agree()


def test_keep_swaps_weights_under_running_rollouts() -> None:
    world = World()
    world.rollouts.rollout_s = 3.0
    world.run()
    assert world.worst_staleness() >= 1


def test_chunks_stream_as_groups_come_and_wait_for_enough_tokens() -> None:
    streamed, whole = World(), World({"trainer": {"min_tokens_per_chunk": 1000}})
    for world in (streamed, whole):
        world.rollouts.slow = {ordinal: 5.0 * ordinal for ordinal in range(8)}
        world.run()
    assert len(streamed.trainer.chunks) > len(whole.trainer.chunks) == 10


def test_recomputed_logprobs_are_asked_for_only_when_the_loss_needs_them() -> None:
    plain, recomputed = World(), World(loss=LossSpec(old_logprobs="policy"))
    plain.run()
    recomputed.run()
    assert plain.trainer.prepared == 0
    assert recomputed.trainer.prepared == len(recomputed.trainer.chunks)


# --- failures of rollouts ------------------------------------------------------------------------


def test_an_infrastructure_failure_is_retried_and_nothing_is_lost() -> None:
    world = World()
    world.rollouts.faults = {3: [lost(3)], 7: [lost(7), lost(7)]}
    world.run()
    world.assert_books_agree()
    assert {3, 7} <= set(world.trained)
    assert (7, 3) in world.rollouts.started


def test_a_prompt_that_cannot_be_rolled_out_is_dropped_by_name_and_replaced() -> None:
    world = World({"rollout": {"drop_budget": 1}})
    world.rollouts.faults = {2: [bad_data(2), bad_data(2)]}
    world.run()
    world.assert_books_agree()
    assert 2 not in world.trained and len(world.trained) == 40
    assert world.built.state.ledger.totals.dropped == Counter(reward_nan=1)


def test_a_dropped_prompt_may_shrink_its_batch_instead() -> None:
    for sampler in (READY_FIRST, IN_ORDER):
        world = World(
            {"rollout": {"drop_budget": 1, "on_dropped_prompt": "shrink"}, "sampler": sampler}
        )
        world.rollouts.faults = {2: [bad_data(2), bad_data(2)]}
        world.run()
        world.assert_books_agree()
        assert sorted(len(step) for step in world.trainer.steps) == [3] + [4] * 9


def test_one_drop_more_than_the_budget_ends_the_run_and_names_the_key() -> None:
    world = World()
    world.rollouts.faults = {2: [bad_data(2), bad_data(2)]}
    assert "rollout.drop_budget" in str(world.fail())


def test_a_bug_in_a_rollout_ends_the_run_at_once() -> None:
    world = World()
    bug = RolloutFailed(FailureKind.BUG, 4, 1, "KeyError", "'answer'")
    world.rollouts.faults = {4: [bug]}
    failure = world.fail()
    assert failure.causes[0] is bug


@pytest.mark.parametrize(
    ("forgery", "complaint"),
    [
        ({"rewards": (1.0,)}, "samples, asked for 2"),
        ({"rewards": (float("nan"), 1.0)}, "not all finite"),
        ({"attempt": 7}, "attempt 7"),
        ({"version_spans": (((99, 2),),) * 2}, "the trainer has made only"),
        ({"version_spans": (((-3, 2),),) * 2}, "the engine had acked"),
        ({"version_spans": (((0, 1),),) * 2}, "do not cover 2 response tokens"),
        ({"response_tokens": (0, 2)}, "without tokens"),
    ],
)
def test_a_forged_receipt_never_enters_the_buffer(forgery: dict[str, Any], complaint: str) -> None:
    world = World()
    world.rollouts.forged = {1: forgery}
    failure = world.fail()
    assert complaint in str(failure)
    assert 1 not in world.trained


def test_a_rollout_past_its_deadline_is_cancelled_and_dispatched_again() -> None:
    world = World({"rollout": {"deadline_s": 20}})

    class OnceHung(FakeRollouts):
        async def rollout(self, fence: Fence, task: Any) -> Any:
            if (task.ordinal, task.attempt) == (5, 1):
                await asyncio.Event().wait()
            return await super().rollout(fence, task)

    world.rollouts = OnceHung(world.generators)
    world.run()
    world.assert_books_agree()
    assert 5 in world.trained


# --- failures of engines -------------------------------------------------------------------------


@pytest.mark.parametrize("moment_s", [0.1, 3.3, 7.7, 12.9, 20.2])
def test_a_killed_engine_comes_back_synced_and_the_run_goes_on(moment_s: float) -> None:
    world = World(engines=1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(moment_s, world.generators["generator-0"].die)
        await world.controller().run()

    run(main())
    world.assert_books_agree()
    assert len(world.trained) == 40
    assert world.built.state.fleet.restarts == 1
    assert world.generators["generator-0"].version == 10


def test_a_silent_engine_is_replaced_while_the_others_go_on() -> None:
    world = World({"rollout": {"deadline_s": 30}})

    async def main() -> None:
        def silence() -> None:
            world.generators["generator-1"].silent = True

        asyncio.get_running_loop().call_later(5, silence)
        await world.controller().run()

    run(main())
    world.assert_books_agree()
    assert world.generators["generator-1"].restarts == 1


@pytest.mark.parametrize("moment_s", [3.3, 6.0, 9.1])
def test_a_broken_engine_in_a_living_process_is_replaced(moment_s: float) -> None:
    world = World()

    async def main() -> None:
        def break_it() -> None:
            world.generators["generator-1"].broken = True

        asyncio.get_running_loop().call_later(moment_s, break_it)
        await world.controller().run()

    run(main())
    world.assert_books_agree()
    assert world.generators["generator-1"].restarts == 1
    assert world.generators["generator-1"].version == 10


def test_an_engine_that_refuses_a_sync_serves_nothing_until_a_later_one_succeeds() -> None:
    world = World(engines=2)
    world.generators["generator-1"].refuse_loads = 1
    world.run()
    world.assert_books_agree()
    assert world.generators["generator-1"].version == 10


def test_an_engine_that_acks_another_digest_never_serves() -> None:
    world = World(overrides={"generator": {"restart_budget": 1}})
    world.generators["generator-1"].lie_about_digest = True
    failure = world.fail()
    assert "generator.restart_budget" in str(failure)
    dispatched = [event for event in world.journal.events if isinstance(event, Dispatched)]
    assert dispatched
    assert {event.engine for event in dispatched} == {"generator-0"}


# --- failures of the trainer ---------------------------------------------------------------------


@pytest.mark.parametrize("where", ["begin", "microbatch"])
def test_a_failed_step_is_aborted_and_tried_again_on_the_same_groups(where: str) -> None:
    world = World()
    world.trainer.fail_at = {3: [where]}
    world.run()
    world.assert_books_agree()
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
    world.assert_books_agree()
    ledger = world.built.state.ledger
    assert (ledger.lineage, ledger.trainer_version, world.trainer.lives) == (1, 10, 2)
    rewound = next(event for event in world.journal.events if isinstance(event, Rewound))
    assert rewound.to_version == 3
    assert ledger.counts()["drawn"] == ledger.counts()["trained"] == 40
    assert ledger.totals.dropped == {}
    summary = world.built.progress.summary("run", "finished", None)
    assert sum(summary.staleness_histogram.values()) == 40 * 2  # what was undone counts once


def test_the_summary_keeps_the_pause_of_the_syncs_apart_from_their_transfer() -> None:
    world = World()
    world.run()
    syncs = world.built.progress.summary("run", "finished", None).syncs
    assert syncs is not None
    assert (syncs.count, syncs.pause_s, syncs.transfer_s) == (10, 0.1, 0.4)


def test_a_trainer_lost_before_any_checkpoint_starts_over() -> None:
    world = World({"checkpoint": {"interval": 0}})
    world.trainer.lose_at_step = 3
    world.run()
    world.assert_books_agree()
    assert len(world.trained) == 40 and world.trainer.lives == 2


def test_a_failed_finish_is_not_guessed_about_but_rewound() -> None:
    world = World({"checkpoint": {"interval": 2}})
    world.trainer.fail_at = {6: ["finish"]}
    world.run()
    world.assert_books_agree()
    rewound = next(event for event in world.journal.events if isinstance(event, Rewound))
    assert rewound.to_version == 4 and "finish" in rewound.reason


def test_a_silent_trainer_is_replaced_at_its_deadline() -> None:
    world = World({"trainer": {"step_deadline_s": 50, "min_tokens_per_chunk": 1}})
    world.trainer.hang = True
    world.run()
    world.assert_books_agree()
    assert world.trainer.lives == 2


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
    world.assert_books_agree()
    assert world.built.state.ledger.checkpoints == []


def test_a_step_not_applied_makes_no_version_and_no_sync() -> None:
    world = World({"rollout": {"drop_budget": 4}})
    world.trainer.refuse_steps = {3}
    world.run()
    world.assert_books_agree()
    assert world.built.state.ledger.totals.dropped == {"step_not_applied": 4}
    assert world.generators["generator-0"].loads == list(range(11))


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


# --- the end of a run ----------------------------------------------------------------------------


def test_stop_finishes_the_step_in_progress() -> None:
    world = World()

    async def main() -> None:
        controller = world.controller()
        asyncio.get_running_loop().call_later(12, controller.control, Stop())
        await controller.run()

    run(main())
    assert 1 <= len(world.trainer.steps) < 10
    assert world.built.state.lifecycle.phase is Phase.FINISHED
    assert list(world.trainer.checkpoints) == [len(world.trainer.steps)], "nothing is trained twice"
    world.assert_books_agree()


def test_a_paused_run_dispatches_nothing_and_begins_no_step_until_it_is_resumed() -> None:
    world = World()

    async def main() -> None:
        controller = world.controller()
        loop, seen = asyncio.get_running_loop(), dict[int, tuple[int, int]]()

        def look(at: int) -> None:
            seen[at] = (len(world.trainer.steps), len(world.rollouts.started))

        loop.call_later(12, controller.control, Pause())
        for at in (30, 500):  # longer than the stall limit: an operator's pause is no stall
            loop.call_later(at, look, at)
        loop.call_later(600, controller.control, Resume())
        await controller.run()
        assert seen[30] == seen[500]

    run(main())
    assert len(world.trainer.steps) == 10
    world.assert_books_agree()


def test_abort_ends_within_a_second_and_closes_every_actor() -> None:
    world = World()
    world.trainer.step_s = 1000

    async def main() -> None:
        controller = world.controller()
        asyncio.get_running_loop().call_later(50, controller.abort, "SIGTERM")
        with pytest.raises(RunFailed) as failure:
            await controller.run()
        assert isinstance(failure.value.causes[0], RunAborted)
        assert asyncio.get_running_loop().time() <= 51
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert world.built.state.lifecycle.phase is Phase.ABORTED
    assert world.trainer.closed and world.rollouts.closed
    assert all(generator.closed for generator in world.generators.values())


def test_an_aborted_run_leaves_a_checkpoint_of_its_last_version() -> None:
    world = World()
    _abort_at(world, 12)
    version = world.built.state.ledger.trainer_version
    assert version and list(world.trainer.checkpoints) == [version]


def test_a_step_that_is_being_finished_when_its_run_is_aborted_is_in_the_last_checkpoint() -> None:
    world = World()

    class Finishing(FakeTrainer):
        async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
            if key.step == 3:
                world.built.abort("SIGTERM")  # and the trainer goes on
                await asyncio.sleep(0.5)
            return await super().finish_train_step(fence, key)

    world.trainer = Finishing(step_s=0.5)
    world.fail()
    assert len(world.trainer.steps) == 3
    assert list(world.trainer.checkpoints) == [3]


def test_an_aborted_run_waits_no_longer_for_a_checkpoint_than_its_grace_allows() -> None:
    world = World({"supervision": {"signal_grace_s": 20}})

    class Slow(FakeTrainer):
        async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
            await asyncio.Event().wait()
            return await super().save_checkpoint(fence, version)

    world.trainer = Slow()
    assert _abort_at(world, 12) == pytest.approx(12 + 0.7 * 20)
    assert world.trainer.closed and world.trainer.checkpoints == {}


def _abort_at(world: World, at: float) -> float:
    """When it has ended."""

    async def main() -> float:
        controller, loop = world.controller(), asyncio.get_running_loop()
        loop.call_later(at, controller.abort, "SIGTERM")
        with pytest.raises(RunFailed):
            await controller.run()
        return loop.time()

    return run(main())


def test_a_cancel_from_outside_stays_a_cancel() -> None:
    world = World()

    async def main() -> None:
        task = asyncio.create_task(world.controller().run())
        await asyncio.sleep(9)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert world.trainer.closed
    assert world.built.state.lifecycle.phase is Phase.ABORTED


def test_a_stall_names_who_waits_for_what() -> None:
    world = World()

    class Stuck(FakePrompts):
        def prompt(self, ordinal: int) -> Any:
            if ordinal >= 6:
                world.built.state.gate_open = False  # a planted bug: nobody opens it again
            return super().prompt(ordinal)

    world.prompts = Stuck()
    failure = world.fail()
    assert isinstance(failure.causes[0], RunStalled)
    assert "train pump waits for ready groups" in str(failure)
    assert "rollout pump waits for room" in str(failure)


def test_the_fold_of_the_journal_is_the_ledger() -> None:
    world = World({"rollout": {"drop_budget": 1}})
    world.rollouts.faults = {2: [bad_data(2), bad_data(2)], 9: [lost(9)]}
    world.trainer.fail_at = {3: ["microbatch"]}
    world.run()
    ledger = world.built.state.ledger
    again = type(ledger).fold(world.journal.events)  # type: ignore[arg-type]
    assert again.counts() == ledger.counts()
    assert again.totals == ledger.totals and again.versions == ledger.versions


def test_the_trained_model_is_kept_at_the_end_unless_told_otherwise() -> None:
    kept, unkept = World(), World({"checkpoint": {"final": False}})
    kept.run()
    unkept.run()
    assert (kept.trainer.saved, unkept.trainer.saved) == ([10], [])


def test_the_outcome_is_told_before_actors_are_closed() -> None:
    world = World(NO_RESTARTS)
    world.trainer.lose_at_step = 2
    told = list[tuple[type[object], bool]]()

    async def main() -> None:
        controller = world.controller()
        with pytest.raises(RunFailed):
            await controller.run(lambda raised: told.append((type(raised), world.trainer.closed)))

    run(main())
    assert told == [(RunFailed, False)]
    assert world.trainer.closed


def test_actors_are_closed_even_if_the_outcome_cannot_be_told() -> None:
    world = World()

    def full_disk(raised: BaseException | None) -> None:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        with pytest.raises(OSError, match="No space left"):
            await world.controller().run(full_disk)

    run(main())
    assert world.trainer.closed
    assert all(generator.closed for generator in world.generators.values())

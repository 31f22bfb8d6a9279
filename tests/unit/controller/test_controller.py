"""The whole controller on fakes and a virtual clock."""

import asyncio
from typing import Any

import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.controller.events import Dispatched
from offbeat.controller.lifecycle import RunPhase
from offbeat.messages.failures import ActorLost
from offbeat.messages.fences import Fence
from offbeat.messages.weights import WeightRelease, WeightsAck
from tests.support.fakes import (
    FakeGenerator,
)
from tests.support.world import IN_ORDER, READY_FIRST, World


@pytest.mark.parametrize("sampler", [READY_FIRST, IN_ORDER], ids=["ready_first", "in_order"])
def test_trains_every_step_within_the_bound_and_generates_nothing_beyond_need(
    sampler: dict[str, Any],
) -> None:
    world = World({"sampler": sampler})
    world.run()
    world.assert_ledger_agrees()
    assert [len(step) for step in world.trainer.steps] == [4] * 10
    assert 1 <= world.worst_staleness() <= 2
    counts = world.built.state.ledger.counts()
    assert counts["drawn"] == counts["trained"] == 40
    assert world.built.state.lifecycle.phase is RunPhase.FINISHED
    assert all(generator.version == 10 for generator in world.generators.values())


@pytest.mark.parametrize("name", ["ready_first", "in_order"])
def test_a_bound_of_zero_is_synchronous(name: str) -> None:
    world = World({"sampler": {"name": name, "max_staleness": 0}})
    world.run()
    assert world.worst_staleness() == 0
    assert world.rollouts.peak <= 4
    assert not world.built.state.ledger.totals.evicted


def test_as_many_groups_are_in_flight_as_the_recipe_allows_and_no_more() -> None:
    world = World({"rollout": {"max_in_flight": 3}})
    world.run()
    assert world.rollouts.peak == 3


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


def test_every_version_counts_when_syncs_are_rarer_than_steps() -> None:
    world = World({"sync": {"interval": 3}})
    world.run()
    world.assert_ledger_agrees()
    assert world.worst_staleness() == 2
    assert world.generators["generator-0"].loads == [0, 3, 6, 9, 10]


def test_the_summary_keeps_the_pause_of_the_syncs_apart_from_their_transfer() -> None:
    world = World()
    world.run()
    syncs = world.built.progress.summary("run", "finished", None).syncs
    assert syncs is not None
    assert (syncs.count, syncs.pause_s, syncs.transfer_s) == (10, 0.1, 0.4)


def test_a_sync_is_told_of_once_however_many_steps_are_taken_until_the_next() -> None:
    world = World({"sync": {"interval": 3}})
    world.run()
    told = [record["step"] for record in world.telemetry.records if "sync/pause_s" in record]
    assert told == [1, 4, 7, 10], "each in the step during which it ended"
    syncs = world.built.progress.summary("run", "finished", None).syncs
    assert syncs is not None and syncs.count == 4


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
    world.assert_ledger_agrees()


def test_chunks_stream_as_groups_come_and_wait_for_enough_tokens() -> None:
    streamed, whole = World(), World({"trainer": {"min_tokens_per_chunk": 1000}})
    for world in (streamed, whole):
        world.rollouts.slow = {prompt_index: 5.0 * prompt_index for prompt_index in range(8)}
        world.run()
    assert len(streamed.trainer.chunks) > len(whole.trainer.chunks) == 10


def test_recomputed_logprobs_are_asked_for_only_when_the_loss_needs_them() -> None:
    plain, recomputed = World(), World(loss=LossSpec(ClippedPgLossConfig(old_logprobs="policy")))
    plain.run()
    recomputed.run()
    assert plain.trainer.prepared == 0
    assert recomputed.trainer.prepared == len(recomputed.trainer.chunks)


# --- failures of rollouts ------------------------------------------------------------------------


def test_what_one_incident_costs_counts_as_one_failure_in_a_row() -> None:
    """Twelve groups are in flight on one worker; its process dies twice before any of them is back."""
    world = World({"rollout": {"consecutive_failures": 3}})
    gone = [ActorLost("environment-0", "rollout", "its process was killed") for _ in range(2)]
    world.rollouts.faults = {prompt_index: list[Exception](gone) for prompt_index in range(12)}
    world.rollouts.slow = dict.fromkeys(range(12), 1.0)
    world.run()
    world.assert_ledger_agrees()
    assert set(range(12)) <= set(world.trained)


def test_one_incident_more_than_allowed_in_a_row_ends_the_run_and_names_the_key() -> None:
    world = World({"rollout": {"consecutive_failures": 3}})
    gone = [ActorLost("environment-0", "rollout", "its process was killed") for _ in range(3)]
    world.rollouts.faults = {prompt_index: list[Exception](gone) for prompt_index in range(12)}
    world.rollouts.slow = dict.fromkeys(range(12), 1.0)
    assert "rollout.consecutive_failures" in str(world.fail())


@pytest.mark.parametrize(
    ("forgery", "complaint"),
    [
        ({"attempt": 7}, "attempt 7"),
        ({"engine_incarnation": "another process"}, "answered by another process"),
    ],
)
def test_a_forged_receipt_never_enters_the_buffer(forgery: dict[str, Any], complaint: str) -> None:
    world = World()
    world.rollouts.forged = {1: forgery}
    failure = world.fail()
    assert complaint in str(failure)
    assert 1 not in world.trained


# --- failures of engines -------------------------------------------------------------------------


@pytest.mark.parametrize("moment_s", [3.3, 6.0, 9.1])
async def test_a_broken_engine_in_a_living_process_is_replaced(moment_s: float) -> None:
    world = World()

    def break_it() -> None:
        world.generators["generator-1"].broken = True

    asyncio.get_running_loop().call_later(moment_s, break_it)
    await world.controller().run()
    world.assert_ledger_agrees()
    assert world.generators["generator-1"].restarts == 1
    assert world.generators["generator-1"].version == 10


def test_an_engine_that_acks_another_digest_never_serves() -> None:
    world = World(overrides={"generator": {"restart_budget": 1}})
    world.generators["generator-1"].lie_about_digest = True
    world.run()
    assert world.generators["generator-1"].retired
    dispatched = [event for event in world.journal.events if isinstance(event, Dispatched)]
    assert dispatched
    assert {event.engine for event in dispatched} == {"generator-0"}

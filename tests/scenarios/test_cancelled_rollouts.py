"""Rollouts that are cancelled, and what their calls make of that. Cases of NeMo-RL, tinker-cookbook."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import pytest

from offbeat.controller.events import AnyEvent, Committed, Dropped, DropReason, Returned, ReturnKind
from offbeat.controller.ledger import Ledger
from offbeat.messages.failures import ActorLost, FailureKind, RolloutFailed
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Receipt, RolloutTask
from tests.support.fakes import FakeRollouts
from tests.support.scenarios import outcome, play, use_rollouts
from tests.support.world import World

NARROW = {"name": "windowed", "max_staleness": 1, "over_sampling_ratio": 1.5}


@dataclass
class FailsItsCleanUp(FakeRollouts):
    """Environment workers that answer a cancel with a failure, after some cleaning up."""

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        try:
            return await super().rollout(fence, task)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
            raise ActorLost("environment-0", "cleanup", "the sandbox was gone") from None


@dataclass
class IgnoresItsCancel(FakeRollouts):
    """Environment workers that go on after a cancel, and answer."""

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        call = asyncio.ensure_future(super().rollout(fence, task))
        while not call.done():
            try:
                await asyncio.shield(call)
            except asyncio.CancelledError:
                continue
        return call.result()


@pytest.mark.parametrize("workers", [FailsItsCleanUp, IgnoresItsCancel])
def test_what_a_cancelled_rollout_still_says_is_not_taken_for_the_next_attempt(
    workers: type[FakeRollouts],
) -> None:
    world = World({"sampler": NARROW})
    rollouts = use_rollouts(world, workers(world.generators, slow={2: 20.0}))
    play(world)
    world.assert_ledger_agrees()
    cancelled = [each for each in world.events(Returned) if each.kind is ReturnKind.CANCELLED]
    assert 2 in {each.prompt_index for each in cancelled}
    assert {each.reason for each in world.events(Returned)} == {"stale"}, "none of them failed"
    committed = {
        (each.receipt.prompt_index, each.receipt.attempt) for each in world.events(Committed)
    }
    assert committed.isdisjoint((each.prompt_index, each.attempt) for each in cancelled)
    assert all(engine.outstanding == 0 for engine in world.built.state.fleet.engines.values())
    assert rollouts.running == 0


def test_a_rollout_that_is_late_and_fails_its_clean_up_is_late() -> None:
    world = World({"rollout": {"deadline_s": 20}})
    use_rollouts(world, FailsItsCleanUp(world.generators, slow={5: 25.0}))
    error, _ = outcome(world)
    assert error is not None and "waited for a worker" in str(error), "deadline by deadline"
    reasons = Counter(each.reason for each in world.events(Returned) if each.prompt_index == 5)
    assert reasons.keys() == {"deadline"}


def test_a_run_that_fails_while_a_clean_up_fails_names_its_own_cause_only() -> None:
    world = World()
    bug = RolloutFailed(FailureKind.BUG, 3, 1, "KeyError", "in the environment")
    use_rollouts(world, FailsItsCleanUp(world.generators, slow={4: 50.0}, faults={3: [bug]}))
    error, at_s = outcome(world)
    assert error is not None and list(error.causes) == [bug]
    assert at_s < 10


# --- rollouts longer than the window ---------------------------------------------------------------


LONG = range(5, 4000, 10)  # a tenth of the prompts


def windowed_run(
    on_evicted: str, long_s: float, steps: int = 60, long: range = LONG
) -> tuple[World, float]:
    """Play a run over rollouts of a second, some of them of ``long_s``; returns how long it took."""
    sampler = {
        "name": "windowed",
        "max_staleness": 1,
        "over_sampling_ratio": 2.0,
        "on_evicted": on_evicted,
    }
    world = World({"steps": steps, "sampler": sampler}, engines=4)
    world.rollouts.slow = {**dict.fromkeys(range(4000), 1.0), **dict.fromkeys(long, long_s)}
    took_s = play(world)
    world.assert_ledger_agrees()
    return world, took_s


def test_a_policy_that_drops_what_is_late_does_not_roll_it_out_again() -> None:
    world, _ = windowed_run("drop", 15.0, steps=30)
    stale = [each for each in world.events(Dropped) if each.reason is DropReason.STALE]
    assert stale
    totals = Ledger.fold(cast("list[AnyEvent]", world.journal.events)).totals
    assert not totals.failed_prompts, "it was asked for, so no budget is spent"
    cancelled = [each for each in world.events(Returned) if each.kind is ReturnKind.CANCELLED]
    assert not cancelled
    attempts = Counter(prompt_index for prompt_index, _ in world.rollouts.started)
    assert max(attempts.values()) == 1


def test_dropped_rollouts_that_are_longer_than_the_window_do_not_starve_the_run() -> None:
    _, quick_s = windowed_run("drop", 1.0)
    _, long_s = windowed_run("drop", 15.0)
    assert long_s < 2 * quick_s


def ready_first_run(long: range) -> float:
    """Play the same rollouts under ``ready_first``; returns how long it took."""
    sampler = {"name": "ready_first", "max_staleness": 1}
    world = World({"steps": 60, "sampler": sampler}, engines=4)
    world.rollouts.slow = {**dict.fromkeys(range(4000), 1.0), **dict.fromkeys(long, 15.0)}
    return play(world)


def test_windowed_is_the_faster_policy_with_long_rollouts_only() -> None:
    """A twentieth of them; the figures of docs/decisions/0001."""
    few = range(5, 4000, 20)
    _, drop_s = windowed_run("drop", 15.0, long=few)
    _, readmit_s = windowed_run("readmit", 15.0, long=few)
    assert drop_s < readmit_s < ready_first_run(few)
    _, without_s = windowed_run("drop", 1.0)
    assert ready_first_run(range(0)) < without_s


def test_what_was_evicted_and_what_was_cancelled_is_counted_in_the_metrics() -> None:
    world = World({"sampler": {"name": "windowed", "max_staleness": 0, "over_sampling_ratio": 2.0}})
    world.rollouts.slow = {2: 60.0}
    play(world)
    kinds = Counter(each.kind for each in world.events(Returned))
    last = world.telemetry.records[-1]
    assert last["rollout/evicted"] > 0 and last["rollout/cancelled"] > 0
    assert kinds[ReturnKind.EVICTED] >= last["rollout/evicted"]
    assert kinds[ReturnKind.CANCELLED] >= last["rollout/cancelled"]

"""Rollouts that are cancelled, and what their calls make of that. Cases of NeMo-RL, tinker-cookbook."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from offbeat.controller.events import Committed, Returned
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
    world.assert_books_agree()
    cancelled = [each for each in world.events(Returned) if each.kind == "cancelled"]
    assert 2 in {each.ordinal for each in cancelled}
    assert {each.reason for each in world.events(Returned)} == {"stale"}, "none of them failed"
    committed = {(each.receipt.ordinal, each.receipt.attempt) for each in world.events(Committed)}
    assert committed.isdisjoint((each.ordinal, each.attempt) for each in cancelled)
    assert all(engine.outstanding == 0 for engine in world.built.state.fleet.engines.values())
    assert rollouts.running == 0


def test_a_rollout_that_is_late_and_fails_its_clean_up_is_late() -> None:
    world = World({"rollout": {"deadline_s": 20}})
    use_rollouts(world, FailsItsCleanUp(world.generators, slow={5: 25.0}))
    error, _ = outcome(world)
    assert error is not None and "waited for a worker" in str(error), "deadline by deadline"
    reasons = Counter(each.reason for each in world.events(Returned) if each.ordinal == 5)
    assert reasons.keys() == {"deadline"}


def test_a_run_that_fails_while_a_clean_up_fails_names_its_own_cause_only() -> None:
    world = World()
    bug = RolloutFailed(FailureKind.BUG, 3, 1, "KeyError", "in the environment")
    use_rollouts(world, FailsItsCleanUp(world.generators, slow={4: 50.0}, faults={3: [bug]}))
    error, at_s = outcome(world)
    assert error is not None and list(error.causes) == [bug]
    assert at_s < 10

"""A ready group that the trainer cannot read: it alone is given back, the others are trained."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from offbeat.controller.errors import BudgetSpent
from offbeat.controller.events import Dropped
from offbeat.messages.failures import UnfitGroup
from offbeat.messages.fences import StepKey
from offbeat.messages.training import Chunk, ChunkResult
from tests.support.fakes import FakeTrainer
from tests.support.world import IN_ORDER, READY_FIRST, World

SAMPLERS = pytest.mark.parametrize("sampler", [READY_FIRST, IN_ORDER], ids=["ready", "in_order"])
PROBLEM = "column 'generation_logprobs' is nan at a trained token"


@dataclass
class Picky(FakeTrainer):
    """Cannot read these groups so many times."""

    cannot_read: Counter[int] = field(default_factory=Counter[int])

    def _accumulate(self, key: StepKey, chunk: Chunk) -> ChunkResult:
        for prompt_index in chunk.prompt_indices:
            if self.cannot_read[prompt_index]:
                self.cannot_read[prompt_index] -= 1
                raise UnfitGroup(0, prompt_index, PROBLEM)
        return super()._accumulate(key, chunk)


def world_of(cannot_read: dict[int, int], **overrides: Any) -> World:
    return World(overrides, trainer=Picky(cannot_read=Counter(cannot_read)))


@SAMPLERS
def test_a_group_that_cannot_be_read_is_rolled_out_again_and_the_others_are_kept(
    sampler: dict[str, Any],
) -> None:
    world = world_of({5: 1}, sampler=sampler)
    world.run()
    world.assert_ledger_agrees()
    totals = world.built.state.ledger.totals
    assert sorted(world.trained) == list(range(40))
    assert totals.retried == {"unfit_for_trainer": 1}
    assert len(world.rollouts.started) == 41, "the others of its step were not rolled out again"


@pytest.mark.parametrize("times", [1, 99], ids=["rolled out again", "replaced"])
def test_a_group_that_cannot_be_read_gets_room_from_groups_of_later_steps(times: int) -> None:
    """Group 5 held 100 bytes, the new rollout may have 1000, and a group of step 3 has the rest."""
    room = {"capacity_mib": 4600 / 2**20}
    retries = {"drop_budget": 1, "data_retries": 1}
    world = world_of({5: times}, sampler=IN_ORDER, buffer=room, rollout=retries)
    world.rollouts.forged = {each: {"payload_bytes": 1000} for each in range(50) if each != 5}
    world.rollouts.slow = {7: 5.0}
    world.run()
    assert len(world.trained) == 40
    assert world.built.state.ledger.totals.retried["no_room"] >= 1


@SAMPLERS
def test_a_group_that_can_never_be_read_is_dropped_by_name_and_replaced(
    sampler: dict[str, Any],
) -> None:
    world = world_of({5: 99}, sampler=sampler, rollout={"drop_budget": 1, "data_retries": 0})
    world.run()
    world.assert_ledger_agrees()
    assert world.built.state.ledger.totals.dropped == {"unfit_for_trainer": 1}
    assert [event.prompt_index for event in world.events(Dropped)] == [5]
    assert [len(step) for step in world.trainer.steps] == [4] * 10
    assert 5 not in world.trained


def test_with_shrink_its_step_goes_without_it() -> None:
    rollout = {"drop_budget": 1, "data_retries": 0, "on_dropped_prompt": "shrink"}
    world = world_of({5: 99}, sampler=IN_ORDER, rollout=rollout)
    world.run()
    world.assert_ledger_agrees()
    assert sorted(len(step) for step in world.trainer.steps) == [3] + [4] * 9


def test_beyond_the_budget_the_run_ends_naming_the_group_and_its_column() -> None:
    world = world_of({5: 99, 6: 99}, rollout={"drop_budget": 1, "data_retries": 0})
    cause = world.fail().causes[0]
    assert isinstance(cause, BudgetSpent)
    assert "drop_budget" in str(cause)
    assert PROBLEM in str(cause)


def test_a_group_that_cannot_be_read_takes_no_retry_from_a_step_that_fails() -> None:
    world = world_of({4: 1, 5: 1, 6: 1}, trainer={"step_retries": 0, "min_tokens_per_chunk": 1})
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40

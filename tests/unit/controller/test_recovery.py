"""A controller that comes after another: what the journal, the trainer and payloads say."""

import asyncio
from typing import Any

import pytest

from offbeat.controller.commands import Stop
from offbeat.controller.errors import OtherWeights, TrainerAhead
from offbeat.controller.events import Checkpointed, Claimed, Opened, Returned, Rewound
from offbeat.controller.ledger import Ledger
from offbeat.controller.run_stats import RunStats
from offbeat.controller.stats_records import RunTotals
from offbeat.messages.failures import InitialWeightsChanged
from offbeat.messages.fences import StepKey
from offbeat.trainers.backend import StepCall
from tests.support import scenarios
from tests.support.fakes import FakeTrainer
from tests.support.virtual_time import run
from tests.support.world import IN_ORDER, READY_FIRST, World


def former_incarnation(steps: int = 4) -> World:
    """A run of some steps, its trainer and engines alive. It has kept no checkpoint."""
    world = World({"steps": steps, "checkpoint": {"interval": 0}})
    world.run()
    return world


def next_incarnation(before: World, events: int | None = None) -> World:
    """The controller after it, which knows the first ``events`` records of the journal."""
    return scenarios.next_incarnation(before, {}, events)


@pytest.mark.parametrize("sampler", [IN_ORDER, READY_FIRST], ids=["in_order", "ready_first"])
def test_a_stop_applies_no_fragment_of_a_batch_and_the_resumed_run_trains_the_whole_step(
    sampler: dict[str, Any],
) -> None:
    """An update over a part of its batch, at the full learning rate, is noisier than all others."""
    before = World({"sampler": sampler})
    before.rollouts.slow = {
        prompt_index: 3.0 * (prompt_index % 4) + 1 for prompt_index in range(40)
    }

    async def main() -> None:
        controller = before.controller()
        asyncio.get_running_loop().call_later(2, controller.control, Stop())
        await controller.run()

    run(main())
    claimed = [
        len(each.prompt_indices) for each in before.journal.events if isinstance(each, Claimed)
    ]
    assert 0 < sum(claimed) < 4, "the stop came within the step"
    assert before.trainer.steps == []
    assert before.built.state.ledger.training == {}
    world = scenarios.next_incarnation(before, {"sampler": sampler})
    world.run()
    world.assert_ledger_agrees()
    assert [len(step) for step in world.trainer.steps] == [4] * 10
    assert sorted(world.trained) == list(range(40)), "also what the stopped step had claimed"


def index_of(world: World, kind: str, nth: int) -> int:
    """Where the nth record of a kind stands in the journal."""
    found = [at for at, event in enumerate(world.journal.events) if type(event).__name__ == kind]
    return found[nth]


def test_the_next_controller_goes_on_where_the_trainer_stands() -> None:
    world = next_incarnation(former_incarnation())
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40 and len(set(world.trained)) == 40
    assert [event.incarnation for event in world.events(Opened)] == [1, 2]
    assert world.events(Rewound) == []


def test_an_intended_step_that_the_trainer_took_is_adopted() -> None:
    before = former_incarnation()
    world = next_incarnation(before, index_of(before, "StepApplied", 3))  # its outcome was lost
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40
    staleness = world.built.state.ledger.steps.staleness
    assert sum(staleness.values()) == 10 * 4 * 2, "the adopted step among all ten"
    assert world.events(Rewound) == []


def test_the_summary_has_the_time_and_the_samples_of_all_incarnations() -> None:
    speeds = list[float]()
    for samples, serving_s in ((0, 0.0), (1000, 50.0)):
        first_step_s = serving_s / 10 or None
        before = RunTotals(
            samples=samples, serving_s=serving_s, wall_s=2 * serving_s, first_step_s=first_step_s
        )
        world = World()
        world.journal.stats = RunStats(before)
        world.run()
        told = world.built.progress.summary("run", "finished", None)
        speeds.append(told.samples_per_s)
        own_s = told.wall_s - 2 * serving_s
        assert told.first_step_s is not None
        assert first_step_s in {None, told.first_step_s}, "the first step of the run"
    assert 0 < own_s < 50
    assert speeds[1] == pytest.approx((1000 + 80) / (50 + 80 / speeds[0]))


def test_a_step_begun_by_whoever_adopted_the_one_before_is_aborted() -> None:
    before = former_incarnation()
    key = StepKey(5, before.trainer.last[1] + 1, 0)
    before.trainer.keys.once(key, StepCall.BEGIN, lambda: None)
    world = next_incarnation(
        before, index_of(before, "StepApplied", 3)
    )  # of both nothing was written
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40


def test_an_intended_step_that_the_trainer_did_not_take_is_trained_once() -> None:
    before = former_incarnation()
    before.trainer.steps.pop()
    before.trainer.last = (3, before.trainer.last[1] - 1)
    world = next_incarnation(before, index_of(before, "StepApplied", 3))
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40


def test_a_trainer_that_is_ahead_of_every_intent_is_refused() -> None:
    before = former_incarnation()
    world = next_incarnation(before, index_of(before, "StepIntent", 3))
    failure = world.fail()
    assert isinstance(failure.causes[0], TrainerAhead)
    assert "version 4" in str(failure) and "journal" in str(failure)


def test_a_new_trainer_is_restored_and_what_it_lost_is_trained_again() -> None:
    before = former_incarnation()
    saved = {2: before.trainer.steps[:2]}
    before.trainer = FakeTrainer(checkpoints=saved)
    world = next_incarnation(before)
    world.run()
    world.assert_ledger_agrees()
    assert [event.to_version for event in world.events(Rewound)] == [2]
    assert world.trainer.steps[:2] == saved[2] and len(world.trained) == 40
    summary = world.built.progress.summary("run", "finished", None)
    assert (summary.rewinds, summary.controller_incarnations) == (1, 2)


def test_a_whole_checkpoint_that_another_run_has_written_is_refused() -> None:
    before = former_incarnation()
    before.journal.events.append(Checkpointed(2, "of this run"))
    before.trainer = FakeTrainer(checkpoints={2: before.trainer.steps[:2]})
    failure = next_incarnation(before).fail()
    assert isinstance(failure.causes[0], OtherWeights)
    assert "this run wrote of this run" in str(failure)


def test_a_trainer_that_began_with_other_initial_weights_than_the_run_is_refused_with_both() -> (
    None
):
    before = former_incarnation()
    before.trainer = FakeTrainer(checkpoints={2: before.trainer.steps[:2]}, initial="others")
    failure = next_incarnation(before).fail()
    assert isinstance(failure.causes[0], InitialWeightsChanged)
    assert "has weights others, but this run began with initial weights" in str(failure)


def test_initial_weights_that_change_within_a_run_are_found_when_its_trainer_is_replaced() -> None:
    world = World({"checkpoint": {"interval": 2}})
    world.trainer.lose_at_step = 5
    world.trainer.change_initial_at_restart = True
    failure = world.fail()
    assert isinstance(failure.causes[0], InitialWeightsChanged)


def test_the_digest_of_the_initial_weights_outlives_the_records_in_a_snapshot() -> None:
    ledger = Ledger.fold(former_incarnation().journal.events)  # type: ignore[arg-type]
    assert ledger.initial_weights == "initial weights"
    assert Ledger.fold([], ledger.snapshot()).initial_weights == "initial weights"


@pytest.mark.parametrize("kept", [True, False], ids=["spooled", "gone"])
def test_ready_groups_stay_only_if_their_payload_can_be_read(kept: bool) -> None:
    before = former_incarnation()
    cut = index_of(before, "StepIntent", 1) + 2  # version 2 is made, groups are ready
    before.trainer.steps = before.trainer.steps[:2]
    before.trainer.last = (2, before.trainer.last[1] - 2)
    known = Ledger.fold(before.journal.events[:cut])  # type: ignore[arg-type]
    ready = set(known.ready)
    assert ready
    spool = scenarios.SurvivingPayloads(lambda prompt_index: kept and prompt_index in ready)
    world = scenarios.next_incarnation(before, {}, cut, payloads=spool)
    world.run()
    world.assert_ledger_agrees()
    lost = {e.prompt_index for e in world.events(Returned) if e.reason == "payload_lost"}
    assert lost == (set() if kept else ready)
    assert len(world.trained) == 40


def test_groups_in_flight_are_rolled_out_again_and_none_is_lost() -> None:
    before = former_incarnation()
    cut = index_of(before, "Dispatched", 3) + 1
    before.trainer = FakeTrainer()
    world = next_incarnation(before, cut)
    world.run()
    world.assert_ledger_agrees()
    returned = {e.prompt_index for e in world.events(Returned) if e.reason == "controller_lost"}
    assert returned == {0, 1, 2, 3}
    assert sorted(world.trained) == list(range(40))

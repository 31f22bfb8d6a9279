"""A rewind of a run without checkpoints may give back millions of groups: a few at a time."""

import asyncio

import pytest

from offbeat.controller.events import Rewound, TrainerReplaced
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.journal.legality import contradiction
from offbeat.controller.ledger import Ledger
from tests.support.fakes import FakeTrainer
from tests.support.virtual_time import run
from tests.support.world import World

WITHOUT_CHECKPOINTS = {"checkpoint": {"interval": 0}}


def run_and_lose_the_trainer_in_step_9(world: World) -> None:
    world.trainer.lose_at_step = 9
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40


def test_other_tasks_get_their_turn_after_every_few_groups_of_a_rewind() -> None:
    turns, seen, given_back = 0, list[int](), list[int]()

    def another_task() -> None:
        nonlocal turns
        turns += 1

    def reached(point: Failpoint) -> None:
        if point is Failpoint.UNDOING:
            seen.append(turns)
            given_back.append(world.built.state.ledger.totals.trained)
            asyncio.get_running_loop().call_soon(another_task)

    world = World(WITHOUT_CHECKPOINTS, reached=reached, groups_per_turn=8)
    run_and_lose_the_trainer_in_step_9(world)
    assert given_back == [24, 16, 8], "of 32 that were trained, 8 at a time"
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("groups_per_turn", [1, 4, 9, 10**6])
def test_a_rewind_in_parts_ends_where_a_rewind_at_once_does(groups_per_turn: int) -> None:
    world = World(WITHOUT_CHECKPOINTS, groups_per_turn=groups_per_turn)
    run_and_lose_the_trainer_in_step_9(world)
    rewinds = world.events(Rewound)
    undone = [step.version for part in reversed(rewinds) for step in part.undone]
    assert undone == list(range(1, 9))
    assert {(each.lineage, each.target) for each in rewinds} == {(1, 0)}
    assert world.built.progress.summary("run", "finished", None).rewinds == 1
    ledger = Ledger()
    for event in world.journal.events:
        assert contradiction(ledger, event) is None  # type: ignore[arg-type]
        ledger.apply(event)  # type: ignore[arg-type]
    assert ledger.counts() == world.built.state.ledger.counts()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_controller_that_dies_between_two_parts_is_followed_by_one_that_goes_on(
    parts: int,
) -> None:
    before = World(WITHOUT_CHECKPOINTS, groups_per_turn=8)
    run_and_lose_the_trainer_in_step_9(before)
    of_parts = [at for at, event in enumerate(before.journal.events) if isinstance(event, Rewound)]
    known = before.journal.events[: of_parts[parts - 1] + 1]
    ledger = Ledger.fold([], Ledger.fold(known).snapshot())  # type: ignore[arg-type]
    assert (ledger.rewinding_to, ledger.trainer_version) == (0, 8 - 2 * parts)
    world = World(WITHOUT_CHECKPOINTS, ledger=ledger, incarnation=2, groups_per_turn=8)
    world.journal.events = list(known)
    world.trainer = FakeTrainer()
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40
    assert {each.lineage for each in world.events(Rewound)} == {1}
    assert len(world.events(TrainerReplaced)) == 1, "the one that the rewind began with"


def test_no_step_is_taken_between_two_parts_of_a_rewind() -> None:
    world = World(WITHOUT_CHECKPOINTS, groups_per_turn=8)
    run_and_lose_the_trainer_in_step_9(world)
    first = next(at for at, each in enumerate(world.journal.events) if isinstance(each, Rewound))
    ledger = Ledger.fold(world.journal.events[: first + 1])  # type: ignore[arg-type]
    ledger.intend(7, 1)
    intent = ledger.intent
    assert intent is not None
    assert "during a rewind to version 0" in str(contradiction(ledger, intent))


def turns_until_recovered(groups_per_turn: int) -> int:
    ledger, turns, is_recovered = Ledger(), 0, False
    for _ in range(40):
        ledger.admit(None)

    def reached(point: Failpoint) -> None:
        nonlocal is_recovered
        is_recovered = is_recovered or point is Failpoint.RECOVERED

    async def main() -> None:
        nonlocal turns
        running = asyncio.ensure_future(world.go())
        while not is_recovered:
            turns += 1
            await asyncio.sleep(0)
        await running

    world = World(ledger=ledger, incarnation=2, reached=reached, groups_per_turn=groups_per_turn)
    run(main())
    return turns


def test_a_controller_that_takes_over_many_waiting_groups_gives_others_their_turn() -> None:
    assert turns_until_recovered(4) == turns_until_recovered(40) + 9

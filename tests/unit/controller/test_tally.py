"""What a run has cost is counted over all incarnations of its controller, and over all resumes."""

import asyncio
from typing import Any

import msgspec
import pytest

from offbeat.controller.events import AnyEvent, Event, Joined, Opened, Spent, TrainerReplaced
from offbeat.controller.ledger import Ledger
from offbeat.controller.run_stats import RunStats
from offbeat.messages.failures import Component
from tests.support.virtual_time import run
from tests.support.world import World


def engine(index: int, incarnation_number: int) -> Joined:
    return Joined(Component.ENGINE, f"generator-{index}", f"incarnation-{incarnation_number}")


def trainer(incarnation_number: int) -> Joined:
    return Joined(Component.TRAINER, "trainer", f"incarnation-{incarnation_number}")


def restarts(*events: Event) -> dict[Component, int]:
    return RunStats.fold(events).costs.restarts


FIRST, SECOND = Opened("run", 1, "a"), Opened("run", 2, "a")
RESUMED = Opened("run", 3, "b")


def test_a_process_that_takes_the_place_of_another_is_a_restart() -> None:
    worker = [Joined(Component.WORKER, "environment-0", name) for name in ("x", "y", "z")]
    joined = engine(0, 1), engine(1, 1), engine(0, 2), *worker
    assert restarts(FIRST, *joined) == {"engine": 1, "worker": 2}


def test_a_process_that_was_lost_while_no_controller_was_there_is_counted_by_the_next_one() -> None:
    assert restarts(FIRST, engine(0, 1), SECOND, engine(0, 2)) == {"engine": 1}
    assert restarts(FIRST, engine(0, 1), SECOND, engine(0, 1)) == {}
    assert restarts(FIRST, trainer(1), SECOND, trainer(2)) == {"trainer": 1}


def test_a_trainer_whose_replacement_a_controller_did_not_live_to_see_is_counted_once() -> None:
    lost = TrainerReplaced("killed")
    found = TrainerReplaced("the trainer was started anew", found=True)
    assert restarts(FIRST, trainer(1), lost, SECOND, found, trainer(2)) == {"trainer": 1}


def test_the_actors_of_a_resumed_run_are_new_and_replace_nobody() -> None:
    before = FIRST, trainer(1), engine(0, 1), engine(0, 2), trainer(2)
    resumed = RESUMED, trainer(7), engine(0, 7), engine(0, 8), trainer(8)
    assert restarts(*before, *resumed) == {"engine": 2, "trainer": 2}


def test_the_time_of_all_incarnations_is_added_up_but_not_that_of_their_starts() -> None:
    first = Spent({"starting": 5.0, "compute": 3.0}, {"compute": 4.0, "starting": 9.0}, 2.0, 1.0, 1)
    second = Spent({"waiting_groups": 2.0}, {"episodes": 4.0}, 2.0, 9.0, 1)
    tally = RunStats.fold([FIRST, first, SECOND, second]).costs
    assert tally.shares() == (
        {"compute": 0.6, "waiting_groups": 0.4},
        {"compute": 0.5, "episodes": 0.5},
    )
    assert tally.verdict() == "reward", "the longer part of a group's life, over both incarnations"
    assert tally.syncs == 2


def hit(world: World, strike: str) -> None:
    if strike == "engine":
        world.generators["generator-0"].die()
    else:
        world.trainer.die()


async def story(world: World, strike: str, lasts_s: float) -> None:
    """Play a controller so long, with one strike; then it is gone without a word."""
    world.trainer.turn = asyncio.Lock()  # of this event loop
    going = asyncio.ensure_future(world.built.run())
    asyncio.get_running_loop().call_later(6.0, hit, world, strike)
    await asyncio.sleep(lasts_s)
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)


@pytest.mark.parametrize("strike", ["engine", "trainer"])
def test_the_summary_counts_what_was_lost_in_every_incarnation_of_the_controller(
    strike: str,
) -> None:
    """Once under the first controller, which is killed, and once under the second."""
    overrides: dict[str, Any] = {"checkpoint": {"interval": 1}}

    async def first(world: World) -> None:
        world.controller()
        await story(world, strike, 15.0)

    async def second(world: World) -> None:
        world.controller()
        await story(world, strike, 200.0)

    killed = World(overrides)
    run(first(killed))
    events: list[Any] = killed.journal.events
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=list[AnyEvent]) == events
    world = World(overrides, ledger=Ledger.fold(events), incarnation=2, trainer=killed.trainer)
    world.generators.update(killed.generators)
    world.journal.stats = RunStats.fold(events)
    run(second(world))
    summary = world.built.progress.summary("run", "finished", None)
    counted = {"engine": summary.restarts, "trainer": summary.trainer_restarts}
    assert counted == {"engine": 0, "trainer": 0} | {strike: 2}
    shares = [summary.trainer_busy_fraction, *summary.trainer_waits.values()]
    assert sum(shares) == pytest.approx(1.0)

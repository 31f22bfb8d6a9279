"""What ends a wait, and what counts as progress."""

import asyncio

import pytest

from offbeat.controller.errors import TrainerLost
from offbeat.controller.pending_waits import Pump
from offbeat.controller.starting import first_answer
from offbeat.controller.state import ObservableState, PromptSupply, SyncState, TrainerStatus
from offbeat.controller.waits import Waits
from offbeat.messages.failures import ActorLost, Component, DeadlineExceeded, StartFailed
from tests.support.virtual_time import run
from tests.support.world import World


def waits_of_a_run() -> Waits:
    return World().controller().state.waits


def test_every_assignment_to_state_of_a_pump_notifies() -> None:
    notified = list[str]()
    supply = PromptSupply(lambda: notified.append("changed"))
    assert (supply.is_exhausted, notified) == (False, [])
    supply.is_exhausted = True
    assert (supply.is_exhausted, notified) == (True, ["changed"])


def test_two_objects_of_one_class_keep_their_own_state() -> None:
    first, second = SyncState(lambda: None), SyncState(lambda: None)
    first.requested_version = 3
    assert (first.requested_version, second.requested_version) == (3, None)


def test_a_pump_that_waits_for_state_is_woken_by_its_assignment() -> None:
    async def wait() -> float:
        waits = waits_of_a_run()
        status = TrainerStatus(waits.changed)
        loop = asyncio.get_running_loop()
        loop.call_later(2, setattr, status, "lost", TrainerLost("a step", "it is gone"))
        await waits.until(Pump.TRAIN, "a loss", lambda: status.lost is not None)
        return waits.changed_at

    assert run(wait()) == 2


def test_the_end_of_a_back_off_is_a_change() -> None:
    async def wait() -> float:
        waits = waits_of_a_run()
        await waits.pause("a group", target="its back-off", for_s=5)
        return waits.changed_at

    assert run(wait()) == 5


def test_a_slow_first_answer_is_waited_for() -> None:
    asked = list[float]()

    async def answer() -> float:
        clock = asyncio.get_running_loop().time
        asked.append(clock())
        await asyncio.sleep(30)
        return clock()

    assert run(first_answer(answer, 100)) == 30
    assert asked == [0, 20]


def test_a_first_answer_that_is_lost_is_asked_for_again() -> None:
    ended = list[str]()

    async def answer() -> int:
        if asyncio.get_running_loop().time() < 40:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("lost")
        return 7

    assert run(first_answer(answer, 100)) == 7
    assert ended == ["lost", "lost"], "no call is left open"


def test_a_process_that_is_lost_while_it_starts_is_asked_again_soon() -> None:
    async def answer() -> float:
        if (now := asyncio.get_running_loop().time()) < 1:
            raise ActorLost("generator-0", "start", "it was killed")
        return now

    assert run(first_answer(answer, 100)) == 1


def test_a_process_that_cannot_start_is_not_asked_again() -> None:
    async def answer() -> None:
        raise StartFailed("generator-0", "no such model")

    with pytest.raises(StartFailed):
        run(first_answer(answer, 100))


def test_state_without_an_assignment_has_its_declared_values() -> None:
    class Door(ObservableState):
        is_open: bool = True

    assert Door(lambda: None).is_open


@pytest.mark.parametrize("again", ["given up", "late"])
def test_a_call_that_is_ended_twice_has_one_error(again: str) -> None:
    async def wait() -> None:
        waits, loop = waits_of_a_run(), asyncio.get_running_loop()

        async def reply() -> None:
            try:
                await loop.create_future()
            except asyncio.CancelledError:
                await asyncio.sleep(2)  # its clean-up
                raise

        loop.call_later(1, waits.give_up, "generator-0", "no probe is answered")
        if again == "given up":
            loop.call_later(1, waits.give_up, "generator-0", "it is given up")
        await waits.call(
            "a group",
            target="generator-0",
            component=Component.WORKER,
            deadline_s=2 if again == "late" else 60,
            reply=reply(),
            engine="generator-0",
        )

    with pytest.raises(ActorLost, match="no probe is answered"):
        run(wait())


def test_calls_with_one_time_to_reply_end_each_at_its_own_deadline() -> None:
    async def wait() -> list[tuple[str, float]]:
        waits, loop = waits_of_a_run(), asyncio.get_running_loop()
        ended = list[tuple[str, float]]()

        async def call(name: str, *, begins_s: float, takes_s: float) -> None:
            await asyncio.sleep(begins_s)
            try:
                await waits.call(
                    name,
                    target="a worker",
                    component=Component.WORKER,
                    deadline_s=10,
                    reply=asyncio.sleep(takes_s),
                )
                ended.append((f"{name} answered", loop.time()))
            except DeadlineExceeded:
                ended.append((f"{name} late", loop.time()))

        await asyncio.gather(
            call("first", begins_s=0, takes_s=60),
            call("second", begins_s=1, takes_s=5),
            call("third", begins_s=2, takes_s=60),
            call("alone", begins_s=40, takes_s=60),
        )
        return ended

    assert run(wait()) == [
        ("second answered", 6),
        ("first late", 10),
        ("third late", 12),
        ("alone late", 50),
    ]

"""What ends a wait, and what counts as progress."""

import asyncio

from offbeat.controller.errors import TrainerLost
from offbeat.controller.observable_state import ObservableState
from offbeat.controller.pending_waits import Pump
from offbeat.controller.pump_state import PromptSupply, SyncState, TrainerStatus
from offbeat.controller.waits import Waits
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


def test_state_without_an_assignment_has_its_declared_values() -> None:
    class Door(ObservableState):
        is_open: bool = True

    assert Door(lambda: None).is_open

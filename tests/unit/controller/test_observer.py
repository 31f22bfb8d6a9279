"""What a run's timeline, its failpoints and its time accounts are given."""

import asyncio
from collections.abc import Mapping
from typing import Any

from offbeat.controller.failpoints import Failpoint
from offbeat.telemetry.time_accounting import TrainerTime
from tests.support.virtual_time import run
from tests.support.world import World


class Lanes:
    """A timeline that keeps which lanes have had which spans."""

    def __init__(self) -> None:
        self.spans = list[tuple[tuple[str, str], str]]()

    def span(self, lane: Any, name: str, start_s: float, end_s: float, **facts: Any) -> None:
        assert start_s <= end_s
        del facts
        self.spans.append((lane, name))

    def mark(self, lane: Any, name: str, at_s: float, **facts: Any) -> None:
        del lane, name, at_s, facts


def test_a_run_reaches_the_failpoints_of_a_step_in_their_order() -> None:
    reached = list[Failpoint]()
    World({"steps": 1, "checkpoint": {"interval": 1}}, reached=reached.append).run()
    order = [
        Failpoint.PUBLISHING,
        Failpoint.PUBLISHED,
        Failpoint.TRANSFERRING,
        Failpoint.ACKED,
        Failpoint.ADMITTED,
        Failpoint.DISPATCHED,
        Failpoint.ANSWERED,
        Failpoint.COMMITTED,
        Failpoint.CLAIMED,
        Failpoint.CHUNK_SENT,
        Failpoint.INTENDED,
        Failpoint.INTENT_DURABLE,
        Failpoint.FINISH_ANSWERED,
        Failpoint.APPLIED,
        Failpoint.APPLIED_DURABLE,
        Failpoint.CLEARED,
        Failpoint.CHECKPOINTING,
        Failpoint.CHECKPOINTED,
    ]
    assert [point for point in dict.fromkeys(reached) if point in order] == order


def test_the_timeline_has_the_waits_of_pumps_the_calls_of_the_trainer_groups_and_syncs() -> None:
    lanes = Lanes()
    World({"steps": 2}, trace=lanes).run()
    names: Mapping[str, set[str]] = {
        kind: {name for (each, _), name in lanes.spans if each == kind}
        for kind in ("pump", "rank", "group", "engine")
    }
    assert {"ready groups", "room for a prompt group", "a version to publish"} <= names["pump"]
    assert {"begin of step 1", "finish of step 2", "publish of version 2"} <= names["rank"]
    assert names["group"] == {"answered"}
    assert {"weights v0", "weights v1", "weights v2"} <= names["engine"]


def test_a_trainer_that_waits_is_with_the_controller_afterwards() -> None:
    async def wait() -> Mapping[str, float]:
        observer = World().controller().state.observer
        with observer.trainer_waits(TrainerTime.WAITING_GATE):
            await asyncio.sleep(3)
        await asyncio.sleep(1)
        with observer.trainer_in(TrainerTime.INCIDENT, Failpoint.ABORTING):
            await asyncio.sleep(2)
        return observer.times.trainer_seconds()

    seconds = run(wait())
    assert seconds[TrainerTime.WAITING_GATE] == 3
    assert seconds[TrainerTime.CONTROLLER] == 1
    assert seconds[TrainerTime.INCIDENT] == 2

"""Who takes a broadcast together."""

import asyncio

from offbeat.actors.ray_broadcast import BroadcastBarrier, BroadcastGenerator, generators_for
from offbeat.actors.ray_ports import RayGenerator
from tests.support.virtual_time import run


def test_those_that_are_asked_together_take_it_together() -> None:
    async def main() -> None:
        gathering = BroadcastBarrier()
        names = ("g0", "g1", "g2")
        told = await asyncio.gather(*(gathering.members(4, name) for name in names))
        assert told == [names] * 3
        assert await gathering.members(5, "g1") == ("g1",)

    run(main())


def test_epochs_are_not_mixed_up() -> None:
    async def main() -> None:
        gathering = BroadcastBarrier()
        told = await asyncio.gather(
            gathering.members(4, "g0"), gathering.members(5, "g1"), gathering.members(4, "g2")
        )
        assert told == [("g0", "g2"), ("g1",), ("g0", "g2")]

    run(main())


def test_one_that_is_cancelled_leaves_the_others_theirs() -> None:
    async def main() -> None:
        gathering = BroadcastBarrier()
        first = asyncio.ensure_future(gathering.members(4, "g0"))
        second = asyncio.ensure_future(gathering.members(4, "g1"))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == ("g0", "g1")

    run(main())


def test_only_a_transport_that_broadcasts_needs_members() -> None:
    assert type(generators_for("object_store", {"g0": None})["g0"]) is RayGenerator
    assert type(generators_for("gloo", {"g0": None})["g0"]) is BroadcastGenerator

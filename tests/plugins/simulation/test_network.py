import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from offbeat.messages.failures import ActorLost
from offbeat.messages.fences import Fence
from offbeat.plugins.simulation.faults import Faults
from offbeat.plugins.simulation.loop import VirtualLoop
from offbeat.plugins.simulation.network import DEATH_NOTICED_S, SimulatedCall, SimulatedNetwork
from offbeat.plugins.simulation.processes import Process
from offbeat.plugins.simulation.schedule import PlannedFault

FENCE = Fence("run", 1)
T = TypeVar("T")


@dataclass
class Echo:
    """An actor that answers with what it was asked, after a while."""

    name: str = "echo"
    in_order: bool = False
    takes_s: float = 1.0
    process: Process = field(default_factory=lambda: Process("echo incarnation 1"))
    served: list[Any] = field(default_factory=list[Any])
    cancelled: list[Any] = field(default_factory=list[Any])

    def serve(self, call: SimulatedCall) -> None:
        (asked,) = call.args
        self.served.append(asked)
        call.on_cancel = lambda: self.cancelled.append(asked)
        asyncio.get_running_loop().call_later(self.takes_s, call.answer, asked)


@dataclass
class Link:
    """A caller, a callee, and what lies between."""

    loop: VirtualLoop
    network: SimulatedNetwork
    echo: Echo
    caller: Process

    async def ask(self, what: object) -> object:
        call = self.network.send(self.caller, self.echo, "echo", FENCE, what)
        try:
            return await call.reply
        except asyncio.CancelledError:
            self.network.cancel(call)
            raise

    def kill_echo(self) -> None:
        self.loop.kill(self.echo.process)
        self.network.died(self.echo.process)


def play(
    main: Callable[[Link], Awaitable[T]], *actions: str, echo: Echo | None = None, seed: int = 0
) -> T:
    loop = VirtualLoop(random.Random(seed), max_events=10_000, max_s=1000)
    planned_faults = [PlannedFault(action, at_step=0) for action in actions]
    faults = Faults(planned_faults, loop, lambda *_: None)
    network = SimulatedNetwork(loop, random.Random(seed), faults)
    link = Link(loop, network, echo or Echo(), Process("caller"))
    faults.step(0)

    async def run() -> T:
        return await main(link)

    try:
        return loop.run_until_complete(loop.create_task(run(), context=link.caller.context))
    finally:
        loop.close()


def test_a_call_is_answered_after_service_and_two_latencies() -> None:
    async def main(link: Link) -> None:
        assert await link.ask("hello") == "hello"
        assert 1.0 < link.loop.time() < 2.0

    play(main)


def test_a_call_to_a_process_that_dies_fails_once_the_death_is_noticed() -> None:
    async def main(link: Link) -> None:
        link.loop.call_later(0.5, link.kill_echo)
        with pytest.raises(ActorLost, match="echo was lost during echo"):
            await link.ask("hello")
        assert link.loop.time() > 0.5 + DEATH_NOTICED_S
        with pytest.raises(ActorLost):
            await link.ask("still there?")

    play(main)


def test_a_frozen_process_never_answers_and_the_caller_has_to_give_up() -> None:
    async def main(link: Link) -> None:
        link.loop.freeze(link.echo.process)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await link.ask("hello")

    play(main)


def test_cancelling_an_await_reaches_the_callee() -> None:
    async def main(link: Link) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.9):
                await link.ask("hello")
        await asyncio.sleep(1)
        assert link.echo.cancelled == ["hello"]

    play(main)


@pytest.mark.parametrize("action", ["request_lost", "answer_lost"])
def test_a_lost_message_is_met_by_silence(action: str) -> None:
    async def main(link: Link) -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await link.ask("hello")
        return len(link.echo.served)

    assert play(main, action) == (action == "answer_lost")


def test_a_doubled_request_is_served_twice_and_answered_once() -> None:
    async def main(link: Link) -> list[Any]:
        assert await link.ask("hello") == "hello"
        await asyncio.sleep(5)
        return link.echo.served

    assert play(main, "request_doubled") == ["hello", "hello"]


async def five_at_once(link: Link) -> list[Any]:
    async with asyncio.TaskGroup() as calls:
        for number in range(5):
            calls.create_task(link.ask(number))
    return link.echo.served


@pytest.mark.parametrize("seed", range(5))
def test_calls_to_an_actor_that_keeps_order_arrive_as_they_were_sent(seed: int) -> None:
    assert play(five_at_once, echo=Echo(in_order=True), seed=seed) == [0, 1, 2, 3, 4]


def test_a_reordered_request_is_overtaken_by_later_ones() -> None:
    served = play(five_at_once, "request_reordered", echo=Echo(in_order=True))
    assert served == [1, 2, 3, 4, 0]


def test_nothing_passes_a_partition_until_it_is_healed() -> None:
    async def main(link: Link) -> None:
        link.network.partition("echo", 30.0)
        assert await link.ask("hello") == "hello"
        assert link.loop.time() > 30.0

    play(main)


def test_a_dead_caller_sends_nothing() -> None:
    async def main(link: Link) -> list[Any]:
        other = Process("dead caller")
        link.loop.kill(other)
        link.network.send(other, link.echo, "echo", FENCE, "from beyond")
        await asyncio.sleep(5)
        return link.echo.served

    assert play(main) == []

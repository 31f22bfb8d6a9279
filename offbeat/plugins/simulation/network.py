"""Network between a controller and the actors, with long-tailed latencies and faults.

    request  ->  the callee's process, which may serve it  ->  reply

A call to a process that dies raises ``ActorLost`` once the death is noticed. A frozen process
never replies. Calls of one controller to the trainer arrive in the order they were sent, as Ray
guarantees, unless a fault reorders them.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from offbeat.messages.failures import ActorLost
from offbeat.messages.fences import Fence
from offbeat.plugins.simulation.faults import FaultMoment, Faults
from offbeat.plugins.simulation.loop import VirtualLoop
from offbeat.plugins.simulation.processes import Process

DEATH_NOTICED_S: Final = 1.4  # measured with Ray: from SIGKILL to the error at the caller
MACHINE_NOTICED_S: Final = ((1.0, 90.0), (60.0, 90.0))
"""Ranges of the time from the loss of a machine to Ray's verdict, measured as 66 s."""
HELD_BACK_S: Final = (0.5, 6.0)  # of a message that is late or overtaken
_BASE_S: Final = 0.0004
_TAIL: Final = 0.998  # the longest latency is 500 times the shortest; the median is twice


Report = tuple[str, int]
"""Incarnation of a worker, and the calls of reward functions that it has made so far."""


class Host(Protocol):
    """An actor: one name, one process after another."""

    name: str
    process: Process
    in_order: bool  # whether requests arrive in the order they were sent

    def serve(self, call: "SimulatedCall") -> None:
        """Handle a request. Runs in the actor's process."""
        ...


class SimulatedCall(msgspec.Struct, eq=False):
    """One request in transit, in service, or answered."""

    network: "SimulatedNetwork"
    caller: Process
    host: Host
    process: Process  # process of the host when the call was sent
    method: str
    fence: Fence
    args: tuple[Any, ...]
    reply: asyncio.Future[Any]
    answered: bool = False
    cancelled: bool = False
    on_cancel: Callable[[], None] | None = None
    report_of: Callable[[], Report] | None = None  # sent by the host with each reply
    on_report: Callable[[Report], None] | None = None  # run at the caller, also for a late reply

    def answer(self, value: object, after_s: float = 0.0) -> None:
        """Reply with a result. A second reply to the same call is ignored."""
        if not self.answered:
            self.network.answer(self, value, None, after_s)

    def fail(self, error: Exception, after_s: float = 0.0) -> None:
        if not self.answered:
            self.network.answer(self, None, error, after_s)


class SimulatedNetwork:
    """All links between processes."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, faults: Faults) -> None:
        self._loop, self._rng, self._draw = loop, rng, rng.random
        self._faults = faults
        self._open: defaultdict[Process, dict[SimulatedCall, None]] = defaultdict(dict)
        """Calls sent to each process that it has not answered."""
        self._cut: dict[str, float] = {}  # end of a partition, by actor
        self._last_arrival: dict[tuple[Process, str], float] = {}

    def latency(self) -> float:
        return _BASE_S / (1.0 - _TAIL * self._draw())

    def partition(self, name: str, until_s: float) -> None:
        """Delay all messages between controller and actor until ``until_s``."""
        self._cut[name] = until_s

    def reaches(self, name: str) -> bool:
        """Return whether messages to and from this actor pass at this moment."""
        return self._cut.get(name, 0.0) <= self._loop.time()

    def send(
        self, caller: Process, host: Host, method: str, fence: Fence, *args: object
    ) -> SimulatedCall:
        """Send a request. The reply is the future of the returned call."""
        loop = self._loop
        process = host.process
        call = SimulatedCall(self, caller, host, process, method, fence, args, loop.create_future())
        if not caller.alive:
            return call  # calls of a dead process have no effect
        if not process.alive:
            noticed = max(loop.time(), process.noticed_at) + self.latency()
            loop.at(noticed, caller, _lost, call)
            return call
        self._open[process][call] = None
        arrives = self._passes(host.name, loop.time() + self.latency())
        kind = self._faults.at(FaultMoment.REQUEST, host.name)
        if kind == "request_lost":
            return call
        if kind == "request_late":
            arrives += self._rng.uniform(*HELD_BACK_S)
        elif kind == "request_doubled":
            loop.at(arrives + self.latency(), process, host.serve, msgspec.structs.replace(call))
        if host.in_order and kind != "request_reordered":
            link = (caller, host.name)
            arrives = max(arrives, self._last_arrival.get(link, 0.0) + 1e-6)
            self._last_arrival[link] = arrives
        elif kind == "request_reordered":
            arrives += self._rng.uniform(*HELD_BACK_S)
        loop.at(arrives, process, host.serve, call)
        return call

    def answer(
        self, call: SimulatedCall, value: object, error: Exception | None, after_s: float
    ) -> None:
        loop = self._loop
        call.answered = True
        self._open[call.process].pop(call, None)
        arrives = self._passes(call.host.name, loop.time() + after_s + self.latency())
        kind = self._faults.at(FaultMoment.ANSWER, call.host.name)
        if kind == "answer_lost":
            return
        if kind == "answer_late":
            arrives += self._rng.uniform(*HELD_BACK_S)
        report = None if call.report_of is None else call.report_of()
        loop.at(arrives, call.caller, _arrive, call, value, error, report)

    def cancel(self, call: SimulatedCall) -> None:
        """Cancel a call that is no longer awaited. The callee learns of it a little later."""
        if not call.answered and call.caller.alive:
            self._open[call.process].pop(call, None)
            self._loop.run_in(self.latency(), call.process, _cancelled, call)

    def died(self, process: Process, noticed_in_s: float = DEATH_NOTICED_S) -> None:
        """Notify the callers of this process of its death, after ``noticed_in_s`` seconds."""
        noticed = process.noticed_at = self._loop.time() + noticed_in_s
        for call in self._open.pop(process, {}):
            self._loop.at(noticed + self.latency(), call.caller, _lost, call)

    def _passes(self, name: str, arrives: float) -> float:
        if self._cut and (until := self._cut.get(name, 0.0)) > arrives:
            return until + self.latency()
        return arrives


def _arrive(
    call: SimulatedCall, value: object, error: Exception | None, report: Report | None
) -> None:
    if report is not None and call.on_report is not None:
        call.on_report(report)
    reply = call.reply
    if reply.done():
        return
    if error is None:
        reply.set_result(value)
    else:
        reply.set_exception(error)


def _lost(call: SimulatedCall) -> None:
    if not call.reply.done():
        call.reply.set_exception(ActorLost(call.host.name, call.method, "its process was killed"))


def _cancelled(call: SimulatedCall) -> None:
    if not call.answered:
        call.cancelled = True
        if call.on_cancel is not None:
            call.on_cancel()

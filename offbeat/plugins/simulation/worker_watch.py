"""Watches a worker's process for a simulated controller: by replies, and by calls that fail."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from offbeat.messages.failures import ActorLost, OffbeatError
from offbeat.messages.fixed_times import RETRY_S
from offbeat.plugins.simulation.network import Report, SimulatedCall

OnWorker = Callable[[str, str], None]
"""Receives the name of a worker, and its process or why that is lost."""
PROBE_EVERY_S: Final = 2.0  # while calls are open, as ``RayWorker`` does
SILENT_S: Final = 10.0
MISSED_PROBES: Final = 2


class WorkerWatch:
    """Tracks one worker for its caller; stands in for ``RayWorker``.

    A reply shows that a process is back only if its call was made after the loss: an earlier one
    may be the late reply of the process that died.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reported = set[str]()  # processes that have replied
        self._losses, self.is_lost = 0, False
        self.calls: dict[SimulatedCall, None] = {}  # open
        self._probing: asyncio.Task[None] | None = None
        self.on_joined: OnWorker = lambda name, process: None  # noqa: ARG005 - nobody counts
        self.on_lost: OnWorker = lambda name, reason: None  # noqa: ARG005 - as above
        self.on_reward_calls: Callable[[str, int], None] = lambda process, calls: None  # noqa: ARG005

    def probe(self, call: Callable[..., Awaitable[object]], kill: Callable[[], None]) -> None:
        """Probe the worker while calls to it are open, or until it is back after a loss."""
        if self._probing is None:
            self._probing = asyncio.ensure_future(self._probe(call, kill))

    async def _probe(
        self, call: Callable[..., Awaitable[object]], kill: Callable[[], None]
    ) -> None:
        missed, began = 0, True
        while began or self.calls or self.is_lost:
            began = False
            await asyncio.sleep(RETRY_S if self.is_lost else PROBE_EVERY_S)
            try:
                async with asyncio.timeout(SILENT_S):
                    await call(on_report=self.answered_since())
            except TimeoutError:
                missed += 1
            except OffbeatError:
                missed = 0  # calls in progress fail with it
            else:
                missed = 0
            if missed == MISSED_PROBES:
                missed = 0
                kill()
                self.lost("it answers nothing and was killed")
        self._probing = None

    def answered_since(self) -> Callable[[Report], None]:
        """Return the callback for the reply to a call that is made at this moment."""
        losses = self._losses

        def answered(report: Report) -> None:
            process, reward_calls = report
            if process not in self._reported or (self.is_lost and losses == self._losses):
                self._reported.add(process)
                self.is_lost = False
                self.on_joined(self._name, process)
            self.on_reward_calls(process, reward_calls)

        return answered

    def lost(self, reason: str) -> None:
        """Report a process as lost, once until one is back; end the calls to it."""
        if not self.is_lost:
            self._losses, self.is_lost = self._losses + 1, True
            self.on_lost(self._name, reason)
        for call in self.calls:
            if not call.reply.done():
                call.reply.set_exception(ActorLost(self._name, call.method, reason))

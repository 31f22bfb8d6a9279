"""The state of one run, owned by the controller and shared by its pumps."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from offbeat.config.run import RunConfig
from offbeat.controller.awaits import Awaits
from offbeat.controller.busy import Busy
from offbeat.controller.fleet import Fleet
from offbeat.controller.ledger import Ledger
from offbeat.controller.lifecycle import Lifecycle, Phase
from offbeat.controller.signal import Signal
from offbeat.messages.fences import Fence
from offbeat.sampler.policy import Sampler, View
from offbeat.transfer_queue.index import QueueIndex

T = TypeVar("T")


@dataclass(slots=True)
class RunState:
    """Everything that changes while a run goes on.

    It changes between two awaits only, by plain calls; ``moved`` follows every change. A reply and
    the ledger entry it causes are never apart, so a cancel finds every group in its place.
    """

    config: RunConfig
    fence: Fence
    ledger: Ledger
    fleet: Fleet
    sampler: Sampler
    busy: Busy
    queue: QueueIndex = field(default_factory=QueueIndex)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    awaits: Awaits = field(default_factory=Awaits)
    changed: Signal = field(default_factory=Signal)
    moved_at: float = 0.0  # event loop's clock
    exhausted: bool = False  # the prompt source is at its end
    stopping: bool = False  # finish the step in progress, then end
    gate_open: bool = True  # rollouts may be dispatched
    serving_since: float | None = None  # event loop's clock at the first served weights

    @property
    def step(self) -> int:
        """The optimizer step in progress, from 1."""
        return self.ledger.trainer_version + 1

    @property
    def quota(self) -> int:
        """Groups the step in progress still needs."""
        ledger = self.ledger
        shrunk = ledger.shrunk.get(self.step, 0)
        return self.config.groups_per_step - shrunk - len(ledger.training)

    def view(self) -> View:
        """The ledger as the sampler sees it."""
        ledger = self.ledger
        return View(
            trainer_version=ledger.trainer_version,
            serving_version=self.fleet.serving_version,
            quota=self.quota,
            waiting=ledger.admitted,
            versions=ledger.versions,
            stamped=ledger.stamped,
            shrunk=ledger.shrunk,
            ready=ledger.ready.values(),
        )

    def moved(self) -> None:
        """Call after every change: the watchdog sees progress, every waiter looks again."""
        self.moved_at = asyncio.get_running_loop().time()
        self.changed.notify()

    async def until(self, who: str, on: str, predicate: Callable[[], bool]) -> None:
        """Wait for our own state to change, under a name."""
        if not predicate():
            await self.awaits.local(who, on=on, until=self.changed.wait_for(predicate))

    async def call(
        self,
        who: str,
        *,
        on: str,
        deadline_s: float,
        reply: Awaitable[T],
        background: bool = False,
    ) -> T:
        """Await a remote reply, under a name and a deadline."""
        return await self.awaits.call(
            who, on=on, deadline_s=deadline_s, reply=reply, background=background
        )

    def enter(self, phase: Phase) -> None:
        self.lifecycle.enter(phase)
        self.moved()

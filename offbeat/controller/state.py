"""State of one run, owned by the controller and shared by its pumps."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from offbeat.config.run import RunConfig
from offbeat.controller.errors import TrainerLost
from offbeat.controller.events import Joined, Retired, Spent, TrainerReplaced
from offbeat.controller.failpoints import Failpoints
from offbeat.controller.fleet import Fleet
from offbeat.controller.ledger import Ledger
from offbeat.controller.lifecycle import Lifecycle, RunPhase
from offbeat.controller.operator import Operator
from offbeat.controller.pending_waits import PendingWaits, Pump
from offbeat.controller.ports import Journal, Trace
from offbeat.controller.run_costs import RunCosts
from offbeat.controller.signal import Signal
from offbeat.controller.time_attribution import TimeAttribution
from offbeat.controller.view import LedgerView
from offbeat.messages.failures import Component
from offbeat.messages.fences import Fence
from offbeat.sampler.policy import Sampler
from offbeat.transfer_queue.index import QueueIndex

T = TypeVar("T")
_JOURNAL_DEADLINE_S: Final = 120.0


@dataclass(slots=True)
class RunState:
    """Mutable state of a run.

    It changes between two awaits only, by plain calls. The ledger notifies of its own changes;
    ``moved`` follows every other one. A reply and the ledger entry it causes are never apart, so a
    cancel finds every group in its place.
    """

    config: RunConfig
    fence: Fence
    ledger: Ledger
    fleet: Fleet
    sampler: Sampler
    busy: TimeAttribution
    journal: Journal
    trace: Trace
    reached: Failpoints
    queue: QueueIndex = field(default_factory=QueueIndex)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    awaits: PendingWaits = field(default_factory=PendingWaits)
    changed: Signal = field(default_factory=Signal)
    engine_signals: dict[str, Signal] = field(init=False)  # by engine
    engines_replaced: int = 0  # processes given up, over the run, but those of retired engines
    moved_at: float = 0.0  # event loop's clock
    evaluations_failed: int = 0  # by this controller
    evaluation_failure: str = ""  # why the last of them failed
    exhausted: bool = False  # the prompt source is at its end
    gate_open: bool = True  # rollouts may be dispatched
    trainer_lost: TrainerLost | None = None  # found by another pump than the train pump
    serving_since: float | None = None  # event loop's clock at the first served weights
    tally: RunCosts = field(
        default_factory=RunCosts
    )  # what all incarnations of the controller have cost
    operator: Operator = field(init=False)
    view: LedgerView = field(init=False)
    _clock: Callable[[], float] = field(init=False)

    def __post_init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.ledger.changed = self.moved
        self.operator = Operator(self.moved)
        self.view = LedgerView(self.ledger, self.fleet, lambda: self.groups_needed)
        self.engine_signals = {name: Signal() for name in self.fleet.engines}

    @property
    def step(self) -> int:
        """Optimizer step in progress, from 1."""
        return self.ledger.trainer_version + 1

    @property
    def groups_needed(self) -> int:
        """Number of groups that the step in progress still needs."""
        ledger = self.ledger
        deficit = ledger.batch_deficits.get(ledger.trainer_version + 1, 0)
        return self.config.groups_per_step - deficit - len(ledger.training)

    @property
    def first_of_life(self) -> int:
        """Return the first step attempt and sync epoch of this incarnation, above all former ones.

        There is room for 4e9 of them, and for 2e6 incarnations within the integers that JSON keeps
        exactly.
        """
        return self.fence.incarnation << 32

    def moved(self) -> None:
        """Notify all waiters; the watchdog counts it as progress.

        The ledger calls it after each of its moves; call it after every other change.
        """
        self.moved_at = self._clock()
        self.changed.notify()

    def engine_moved(self, name: str) -> None:
        """Notify an engine's pump and account its time. Call after every change of an engine."""
        self.busy.engine_changed(self.fleet.engines[name])
        self.engine_signals[name].notify()
        self.moved()

    def joined(
        self, component: Component, name: str, incarnation: str, initial_weights: str = ""
    ) -> None:
        """Record the reply of a process: a new one is counted and written to the journal."""
        if self.tally.is_new(name, incarnation):
            self.count(Joined(component, name, incarnation, initial_weights))

    def count(self, event: Joined | Retired | TrainerReplaced | Spent) -> None:
        """Count a cost of the run, for this incarnation and those after it."""
        self.tally.take(event)
        self.ledger.note(event)

    async def until(
        self, pump: Pump, on: str, predicate: Callable[[], bool], *, who: str = ""
    ) -> None:
        """Wait for our own state to change, under the pump's name or that of its call."""
        if not predicate():
            clock = asyncio.get_running_loop().time
            since = clock()
            until = self.changed.wait_for(predicate)
            await self.awaits.local(who or pump, on=on, until=until, pump=pump)
            self.trace.span(("pump", pump), on, since, clock())

    async def call(
        self,
        who: str,
        *,
        on: str,
        component: Component,
        deadline_s: float,
        reply: Awaitable[T],
        background: bool = False,
    ) -> T:
        """Await a remote reply, under a name and a deadline."""
        return await self.awaits.call(
            who,
            on=on,
            component=component,
            deadline_s=deadline_s,
            reply=reply,
            background=background,
        )

    async def durable(self, who: str) -> None:
        """Wait until everything recorded so far would survive a crash."""
        await self.call(
            who,
            on="the journal",
            component=Component.JOURNAL,
            deadline_s=_JOURNAL_DEADLINE_S,
            reply=self.journal.barrier(),
        )

    def check_trainer(self) -> None:
        """Raise the loss of the trainer that another pump found."""
        if self.trainer_lost is not None:
            raise self.trainer_lost

    def enter(self, phase: RunPhase) -> None:
        self.lifecycle.enter(phase)
        self.moved()

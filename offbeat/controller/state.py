"""State of one run, owned by the controller and shared by its pumps."""

import asyncio

from offbeat.config.run import RunConfig
from offbeat.controller.cpu_seconds import CpuSeconds
from offbeat.controller.engine_record import EngineRecord
from offbeat.controller.events import AnyEvent, CostEvent, Joined, RewardCallsMade, WorkerLost
from offbeat.controller.fleet import Fleet
from offbeat.controller.ledger import Ledger
from offbeat.controller.lifecycle import Lifecycle
from offbeat.controller.observer import Observer
from offbeat.controller.operator import Operator
from offbeat.controller.outage import OutageBreaker
from offbeat.controller.ports import Ports
from offbeat.controller.pump_state import (
    EvaluationState,
    PromptSupply,
    SyncState,
    TrainerStatus,
)
from offbeat.controller.run_costs import RunCosts
from offbeat.controller.signal import Signal
from offbeat.controller.view import LedgerView
from offbeat.controller.waits import Waits
from offbeat.messages.failures import Component
from offbeat.messages.fences import Fence
from offbeat.messages.worker_report import WorkerReport
from offbeat.sampler.policy import Sampler
from offbeat.transfer_queue.index import QueueIndex


class RunState:
    """Mutable state of a run, in parts that notify whoever waits for a change of them.

    It changes between two awaits only, by plain calls. A reply and the ledger entry it causes are
    never apart, so a cancel finds every group in its place.
    """

    def __init__(
        self, config: RunConfig, fence: Fence, ports: Ports, sampler: Sampler, ledger: Ledger
    ) -> None:
        """Create the state on the event loop that runs the controller."""
        self.config, self.fence, self.sampler = config, fence, sampler
        self.journal = ports.journal
        self.fleet = Fleet(
            ports.generators,
            config.generator.request_strikes,
            on_change=self._engine_changed,
            on_report=self._engine_reported,
        )
        self.observer = Observer(ports, self.fleet.engines)
        self.waits = waits = Waits(ports.journal, self.observer)
        self.ledger = ledger
        ledger.record, ledger.changed = ports.journal.append, self._ledger_changed
        self.queue = QueueIndex(waits.changed)
        self.engine_signals = {name: Signal() for name in self.fleet.engines}
        self.lifecycle = Lifecycle(waits.changed, asyncio.get_running_loop().time)
        self.operator = Operator(waits.changed)
        self.prompts = PromptSupply(waits.changed)
        self.outage = OutageBreaker(config.rollout)
        self.trainer = TrainerStatus(waits.changed)
        self.sync = SyncState(waits.changed)
        self.evaluation = EvaluationState(waits.changed)
        self.cpu = CpuSeconds(ports.cpu_s)
        self.tally = RunCosts()  # what all incarnations of the controller have cost
        self.view = LedgerView(
            ledger,
            serving_version=lambda: self.fleet.serving_version,
            groups_needed=lambda: self.groups_needed,
        )

    @property
    def step(self) -> int:
        """Return the optimizer step in progress, from 1."""
        return self.ledger.trainer_version + 1

    @property
    def groups_needed(self) -> int:
        """Return the number of groups that the step in progress still needs."""
        ledger = self.ledger
        deficit = ledger.batch_deficits.get(ledger.trainer_version + 1, 0)
        return self.config.groups_per_step - deficit - len(ledger.training)

    @property
    def first_of_incarnation(self) -> int:
        """Return the first step attempt and sync epoch of this incarnation, above all former ones.

        There is room for 4e9 of them, and for 2e6 incarnations within the integers that JSON keeps
        exactly.
        """
        return self.fence.incarnation << 32

    def joined(
        self, component: Component, name: str, incarnation: str, initial_weights: str = ""
    ) -> None:
        """Record the reply of a process: a new one is counted and written to the journal.

        A worker that was replaced while nobody called it is recorded as lost first.
        """
        if component is Component.WORKER and self.tally.is_unseen_loss(name, incarnation):
            self.worker_lost(name, "another process answers under its name")
        if self.tally.is_new(name, incarnation):
            self.count(Joined(component, name, incarnation, initial_weights))

    def worker_lost(self, name: str, reason: str) -> None:
        """Record that a worker's process is lost, once until ``joined`` says that it is back."""
        if name not in self.tally.lost_workers:
            self.count(WorkerLost(name, reason))

    def worker_reported(self, report: WorkerReport) -> None:
        """Take what a worker's process says of itself with a reply, which may be late."""
        self.reward_calls(report.incarnation, report.reward_calls)
        self.cpu.worker_reported(report.incarnation, report.cpu_s)

    def reward_calls(self, process: str, calls: int) -> None:
        """Record how many calls a worker's process has made; an older report changes nothing."""
        if calls > self.tally.reward_calls_of.get(process, 0):
            self.count(RewardCallsMade(process, calls))

    def count(self, event: CostEvent) -> None:
        """Count a cost of the run, for this incarnation and those after it."""
        self.tally.take(event)
        self.ledger.note(event)

    def _ledger_changed(self, event: type[AnyEvent]) -> None:
        self.waits.changed()
        self.observer.recorded(event)

    def _engine_reported(self, engine: EngineRecord) -> None:
        self.observer.times.engine_changed(engine)

    def _engine_changed(self, engine: EngineRecord) -> None:
        self.observer.times.engine_changed(engine)
        self.engine_signals[engine.name].notify()
        self.waits.changed()

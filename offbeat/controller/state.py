"""State of one run, owned by the controller and shared by its pumps."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from offbeat.config.run import RunConfig
from offbeat.controller.commands import Command, Stop
from offbeat.controller.engine_record import EngineRecord
from offbeat.controller.errors import TrainerLost
from offbeat.controller.events import (
    AnyEvent,
    Dropped,
    DropReason,
    EngineLost,
    Joined,
    Retired,
    RewardCallsMade,
    Rewound,
    StepRefused,
    TrainerReplaced,
    WorkerLost,
)
from offbeat.controller.fleet import Fleet
from offbeat.controller.ledger import Ledger
from offbeat.controller.lifecycle import Lifecycle
from offbeat.controller.observer import Observer
from offbeat.controller.outage import OutageBreaker
from offbeat.controller.ports import Ports
from offbeat.controller.signal import Signal
from offbeat.controller.stats_records import RunCosts
from offbeat.controller.view import LedgerView
from offbeat.controller.waits import Waits
from offbeat.messages.failures import Component
from offbeat.messages.fences import Fence
from offbeat.messages.groups import group_id
from offbeat.messages.text import printable
from offbeat.messages.weights import WeightRelease
from offbeat.messages.worker_report import WorkerReport
from offbeat.sampler.policy import Sampler
from offbeat.telemetry.status_file import IncidentLine
from offbeat.transfer_queue.index import QueueIndex

_MAX_PROCESSES: Final = 8192
"""Worker processes remembered: more than live at once, because each restart adds one."""


class CpuSeconds:
    """CPU seconds of controller, workers and engines since the last step. Pure but for its clock.

    Every process reports a sum since its own start. So a report that is lost, late or repeated
    changes no total.
    """

    def __init__(self, own: Callable[[], float]) -> None:
        """Create the sums. ``own`` returns the CPU seconds of this process since its start."""
        self._own = own
        self._of_workers = dict[str, float]()  # by process, the one that reported longest ago first
        self._workers_s = 0.0  # of all processes
        self._before: dict[str, float] | None = None

    @property
    def processes(self) -> int:
        """Return the number of remembered worker processes."""
        return len(self._of_workers)

    def worker_reported(self, process: str, cpu_s: float) -> None:
        """Record the CPU seconds of a worker's process. A report may be late."""
        before = self._of_workers.pop(process, 0.0)
        self._of_workers[process] = max(cpu_s, before)
        self._workers_s += max(0.0, cpu_s - before)
        if len(self._of_workers) > _MAX_PROCESSES:
            del self._of_workers[next(iter(self._of_workers))]

    def lap(self, engines: Iterable[EngineRecord]) -> dict[str, float]:
        """Return metrics of the seconds since the last call, or nothing at the first call.

        The seconds before the first call belong to the start of the processes, not to a step.
        """
        totals = {
            "cpu/controller_s": self._own(),
            "cpu/workers_s": self._workers_s,
            "cpu/engines_s": sum(engine.cpu_s for engine in engines),
        }
        before, self._before = self._before, totals
        if before is None:
            return {}
        return {name: max(0.0, total - before[name]) for name, total in totals.items()}


class Operator:
    """The operator's commands, oldest first, and the state set by those already executed.

    Every change notifies the waiting tasks.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._inbox = deque[Command]()
        self._is_paused = False
        self._ended_by = ""

    @property
    def is_paused(self) -> bool:
        """Return whether no step begins and no rollout is dispatched. The open step continues."""
        return self._is_paused

    @property
    def is_stopping(self) -> bool:
        """Return whether the run ends after the step in progress."""
        return bool(self._ended_by)

    @property
    def ended_by(self) -> str:
        """Return the reason to stop the run before its last step, or "" if there is none."""
        return self._ended_by

    def send(self, command: Command) -> None:
        """Queue a command after the pending ones."""
        self._inbox.append(command)
        self._changed()

    def has_command(self) -> bool:
        """Return whether a command waits to be carried out."""
        return bool(self._inbox)

    def next_command(self) -> Command:
        """Remove and return the oldest command. There must be one."""
        return self._inbox.popleft()

    def pause(self) -> None:
        self._is_paused = True
        self._changed()

    def resume(self) -> None:
        self._is_paused = False
        self._changed()

    def stop(self, reason: str = Stop().reason) -> None:
        """Have the run end after the step in progress. The first reason is kept."""
        self._ended_by = self._ended_by or reason
        self._changed()


class ObservableState:
    """State that notifies the waiting tasks of every assignment.

    So a pump cannot forget to notify. All assignments within one turn of the event loop make the
    waiting tasks check once.
    """

    _changed: Callable[[], None]

    def __init__(self, changed: Callable[[], None]) -> None:
        object.__setattr__(self, "_changed", changed)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        self._changed()


class PromptSupply(ObservableState):
    """State of the prompt source as the rollout pump has found it."""

    is_exhausted: bool = False
    """The prompt source is at its end, so no fresh group can come."""


class TrainerStatus(ObservableState):
    """Open calls of the trainer, and its loss if a pump other than the train pump has found one."""

    open_calls: int = 0
    """Calls without a reply. Every reply is progress."""
    lost: TrainerLost | None = None

    def check(self) -> None:
        """Raise the trainer's loss, if one was found.

        Raises:
            TrainerLost: Another pump has found that the trainer is gone or unusable.
        """
        if self.lost is not None:
            raise self.lost


class SyncState(ObservableState):
    """Current release of the weights, the request for the next one, and the gate of rollouts."""

    requested_version: int | None = None
    """Version to publish, or None once its snapshot is made."""
    is_busy: bool = False
    """A release is being made, or engines load it."""
    release: WeightRelease | None = None
    """The newest release of this lineage."""
    is_lost: bool = False
    """The release can no longer be fetched."""
    is_gate_open: bool = True
    """Rollouts may be dispatched."""

    @property
    def is_there(self) -> bool:
        """Return whether engines have a release to load."""
        return self.release is not None and not self.is_lost

    @property
    def is_settled(self) -> bool:
        """Return whether no release is requested or being made, and the newest can be fetched."""
        return self.requested_version is None and not (self.is_busy or self.is_lost)


class EvaluationState(ObservableState):
    """The version to score, and the evaluations that failed in this incarnation."""

    requested_version: int | None = None
    """Version to score, or None once its evaluation runs."""
    newest_due: int = 0
    """Newest version whose evaluation was requested, or was due before this incarnation."""
    is_busy: bool = False
    """A version is being scored."""
    failed_count: int = 0
    failure: str = ""
    """Reason of the last failed evaluation."""


class LatestScores(NamedTuple):
    """Mean rewards of the newest evaluation of this incarnation, by set, for the status only."""

    version: int = 0
    rewards: Mapping[str, float] = MappingProxyType({})


class RunState:
    """Mutable state of a run, in parts that notify the waiting tasks of a change.

    It changes only between two awaits, by plain calls. A reply and its ledger entry are recorded
    together. So whenever a task is cancelled, the recorded place of every group is right.
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
        self.incidents = IncidentLog()
        ledger.record, ledger.changed = self._record, self._ledger_changed
        self.queue = QueueIndex(waits.changed)
        self.engine_signals = {name: Signal() for name in self.fleet.engines}
        self.lifecycle = Lifecycle(waits.changed, asyncio.get_running_loop().time)
        self.operator = Operator(waits.changed)
        self.prompts = PromptSupply(waits.changed)
        self.outage = OutageBreaker(config.rollout)
        self.trainer = TrainerStatus(waits.changed)
        self.sync = SyncState(waits.changed)
        self.evaluation = EvaluationState(waits.changed)
        self.scores = LatestScores()  # nobody waits for them
        self.cpu = CpuSeconds(ports.cpu_s)
        self.view = LedgerView(
            ledger,
            serving_version=lambda: self.fleet.serving_version,
            groups_needed=lambda: self.groups_needed,
        )

    @property
    def costs(self) -> RunCosts:
        """Return the costs of all incarnations of the controller."""
        return self.journal.stats.costs

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
        """Return the first number for this incarnation's step attempts and sync epochs.

        It is above all numbers of former incarnations.

        There is room for 4e9 attempts and epochs, and for 2e6 incarnations within the integers that
        JSON keeps exactly.
        """
        return self.fence.incarnation << 32

    def joined(
        self, component: Component, name: str, incarnation: str, initial_weights: str = ""
    ) -> None:
        """Record the reply of a process. A new process is counted and written to the journal.

        If a worker was replaced before any call noticed its loss, the loss is recorded first.
        """
        if component is Component.WORKER and self.costs.is_unseen_loss(name, incarnation):
            self.worker_lost(name, "another process answers under its name")
        if self.costs.is_new(name, incarnation):
            self.ledger.note(Joined(component, name, incarnation, initial_weights))

    def worker_lost(self, name: str, reason: str) -> None:
        """Record that a worker's process is lost. Do so only once until it has joined again."""
        if name not in self.costs.lost_workers:
            self.ledger.note(WorkerLost(name, reason))

    def worker_reported(self, report: WorkerReport) -> None:
        """Record the report that a worker process attached to its reply. It may be late."""
        self.reward_calls(report.incarnation, report.reward_calls)
        self.cpu.worker_reported(report.incarnation, report.cpu_s)

    def reward_calls(self, process: str, calls: int) -> None:
        """Record how many reward calls a worker's process has made. Ignore older reports."""
        if calls > self.costs.reward_calls_of.get(process, 0):
            self.ledger.note(RewardCallsMade(process, calls))

    def _record(self, event: AnyEvent) -> None:
        self.journal.append(event)
        if type(event) in INCIDENTS:
            self.incidents.add_event(event, self.step)

    def _ledger_changed(self, event: type[AnyEvent]) -> None:
        self.waits.changed()
        self.observer.recorded(event)

    def _engine_reported(self, engine: EngineRecord) -> None:
        self.observer.times.engine_changed(engine)

    def _engine_changed(self, engine: EngineRecord) -> None:
        self.observer.times.engine_changed(engine)
        self.engine_signals[engine.name].notify()
        self.waits.changed()


_KEPT: Final = 16
_LONGEST: Final = 300  # characters of a reason
INCIDENTS: Final = frozenset(
    {EngineLost, WorkerLost, Retired, TrainerReplaced, Rewound, Dropped, StepRefused}
)
"""Types of events that may be incidents."""


class IncidentLog:
    """The newest incidents of this controller, numbered from 1."""

    def __init__(self) -> None:
        self._kept = deque[IncidentLine](maxlen=_KEPT)
        self._count = 0
        self._is_out = False

    @property
    def newest(self) -> tuple[IncidentLine, ...]:
        """Return the newest incidents, oldest first."""
        return tuple(self._kept)

    def add_event(self, event: AnyEvent, step: int) -> None:
        """Add an event of ``INCIDENTS`` if a user wants to know about it. ``step`` is in progress."""
        if text := _describe(event):
            self._add(step, text)

    def observe_outage(self, outage: OutageBreaker, step: int) -> None:
        """Add the beginning and the end of an outage of the environment."""
        if outage.is_open is not self._is_out:
            self._is_out = outage.is_open
            self._add(step, outage.describe() or "the environment answers again")

    def _add(self, step: int, text: str) -> None:
        self._count += 1
        self._kept.append(IncidentLine(self._count, step, printable(text, longest=_LONGEST)))


def _describe(event: AnyEvent) -> str:
    """Describe an event, or return "" if it is not an incident."""
    match event:
        case EngineLost():
            text = f"{event.engine} was lost: {event.reason}"
        case WorkerLost():
            text = f"{event.worker} was lost: {event.reason}"
        case Retired():
            text = f"{event.engine} is retired: {event.reason}"
        case TrainerReplaced(found=True):
            text = "the run continues: a new trainer loads the newest checkpoint"
        case TrainerReplaced():
            text = f"the trainer was lost and is replaced: {event.reason}"
        case Rewound(rewinding_to=None):
            text = f"rewound to version {event.to_version}: {event.reason}"
        case StepRefused():
            text = f"step {event.step} was not applied: {event.reason}"
        case Dropped(reason=DropReason.DATA | DropReason.INFRASTRUCTURE | DropReason.STALE):
            text = f"{group_id(event.prompt_index)} was dropped: {event.label}"
        case _:
            text = ""
    return text

"""Computes a run's figures from its records: times, rates, costs, and sums between two snapshots.

The journal, its readers and the running controller use the same code. So a figure is computed the
same way for a snapshot, a page, ``status.json`` and ``summary.json``. The journal writes the sums
next to each snapshot. So even for millions of groups, a reader of the run reads some kilobytes per
snapshot instead of megabytes of records. Pure: no I/O, no clock.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    EngineLost,
    Event,
    Joined,
    Opened,
    Released,
    Retired,
    Returned,
    RewardCallsMade,
    Rewound,
    Served,
    Spent,
    StepApplied,
    StepRefused,
    TrainerReplaced,
    Unclaimed,
    WorkerLost,
)
from offbeat.controller.group_table import GroupTable
from offbeat.controller.stats_records import (
    Aggregates,
    CarriedState,
    RareEvent,
    RunCosts,
    RunTotals,
    TimeBins,
    align,
)
from offbeat.messages.failures import Component
from offbeat.telemetry.summary import GroupCounts, Summary
from offbeat.telemetry.time_accounting import GeneratorTime, TrainerTime

QUIET_S: Final = 1.0
"""Shorter times without any record never count as a quiet spell."""

_QUIET_SPELLS: Final = 100  # the longest quiet spells kept of each part
_StepRow = tuple[tuple[float, ...], tuple[tuple[int, int], ...]]
_TRAINER: Final = "trainer"
_SYNC: Final = "sync"


class RunStats:
    """Adds each record to the sums over the run and the sums since the last snapshot."""

    def __init__(
        self, totals: RunTotals | None = None, carried: CarriedState | None = None
    ) -> None:
        """Continue from the ``totals`` and ``carried`` of the snapshot before the next record."""
        self.totals = totals or RunTotals()
        self.carried = carried or CarriedState()
        self._load = dict[str, int]()
        self._since = dict[str, float]()  # since when an engine has had a group
        for engine in self.carried.engine_of.values():
            self._load[engine] = self._load.get(engine, 0) + 1
            self._since[engine] = self.carried.at_s
        self._begin_part(self.carried.at_s)
        # A type is looked up faster than a match tries its cases, and most records are of four.
        self._handlers: dict[type[Event], Callable[[Any, float, float], None]] = {
            Admitted: self._admitted,
            Dispatched: self._dispatched,
            Committed: self._committed,
            Returned: self._left,
            Dropped: self._left,
            Claimed: self._claimed,
            StepApplied: self._applied,
            StepRefused: self._aborted,
            Unclaimed: self._aborted,
            Spent: self._spent,
            RewardCallsMade: self._called_rewards,
            Released: self._released,
            Served: self._served,
            Opened: self._opened,
            Joined: self._joined,
            WorkerLost: self._worker_lost,
            EngineLost: self._engine_lost,
            Retired: self._retired,
            TrainerReplaced: self._trainer_replaced,
            Rewound: self._rewound,
        }

    @classmethod
    def fold(cls, events: Iterable[Event]) -> "RunStats":
        """Return the figures of all events of a run."""
        stats = cls()
        for event in events:
            stats.add(event)
        return stats

    @property
    def costs(self) -> RunCosts:
        """Return the costs of all incarnations so far."""
        return self.totals.tally

    def add(self, event: Event) -> None:
        """Add the next record."""
        totals, carried, kind, unix_s = self.totals, self.carried, type(event), event.unix_s
        if unix_s > totals.at_s and kind is not Opened:
            spent_s = unix_s - totals.at_s
            totals.wall_s += spent_s
            if totals.serving:
                totals.serving_s += spent_s
        totals.at_s = unix_s
        before_s = carried.at_s
        if not (before_s or self._records):  # the first record of the run
            before_s = carried.lap_s = unix_s
            self._begin_part(unix_s)
        at_s = max(before_s, unix_s)  # a clock that was set back
        self._records += 1
        if at_s - before_s > carried.pause_s:
            self._note_pause(kind, before_s, at_s)
        carried.at_s = at_s
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(event, before_s, at_s)

    def _begin_part(self, at_s: float) -> None:
        self._records = 0
        self._began_s = at_s
        self._lowest, self._highest = math.inf, -1
        self._rows = list[_StepRow]()
        self._undone_to: int | None = None
        self._rare = list[RareEvent]()
        self._quiet = list[tuple[float, float, int]]()
        self._busy = TimeBins(at_s)
        self._engine_busy, self._trainer_s, self._engine_s = (TimeBins(at_s) for _ in range(3))

    def _note_pause(self, kind: type[Event], before_s: float, at_s: float) -> None:
        """Note the longest time without a record in this step so far."""
        carried = self.carried
        carried.pause_s = at_s - before_s
        if carried.pause_s > QUIET_S and carried.serving and kind is not Opened:
            self._quiet.append((before_s, at_s, carried.version))

    def _note_rare(self, event: AnyEvent, before_s: float) -> None:
        self._rare.append(RareEvent(self.carried.version, before_s, event))

    # --- groups and engines ----------------------------------------------------------------------

    def _about(self, prompt_index: int) -> None:
        self._lowest = min(self._lowest, prompt_index)
        self._highest = max(self._highest, prompt_index)

    def _admitted(self, event: Admitted, _before_s: float, _at_s: float) -> None:
        self._about(event.prompt_index)

    def _dispatched(self, event: Dispatched, _before_s: float, at_s: float) -> None:
        engine = event.engine
        self._about(event.prompt_index)
        self.carried.engine_of[event.prompt_index] = engine
        load = self._load.get(engine, 0)
        if not load:
            self._since[engine] = at_s
        self._load[engine] = load + 1

    def _committed(self, event: Committed, _before_s: float, at_s: float) -> None:
        self._end_group(event.receipt.prompt_index, at_s)

    def _left(self, event: Returned | Dropped, _before_s: float, at_s: float) -> None:
        self._end_group(event.prompt_index, at_s)

    def _end_group(self, prompt_index: int, at_s: float) -> None:
        self._about(prompt_index)
        engine = self.carried.engine_of.pop(prompt_index, None)
        if engine is not None:
            self._load[engine] -= 1
            if not self._load[engine]:
                self._end_of_engine(engine, at_s)

    def _end_of_engine(self, engine: str, at_s: float) -> None:
        since_s = self._since.pop(engine, None)
        if since_s is not None:
            self._engine_busy.add(engine, since_s, at_s, at_s - since_s)

    # --- steps and weights -----------------------------------------------------------------------

    def _claimed(self, _event: Claimed, _before_s: float, at_s: float) -> None:
        if self.carried.trainer_since_s is None:
            self.carried.trainer_since_s = at_s

    def _aborted(self, _event: StepRefused | Unclaimed, _before_s: float, at_s: float) -> None:
        self._end_step(at_s)

    def _applied(self, event: StepApplied, _before_s: float, at_s: float) -> None:
        totals, carried = self.totals, self.carried
        totals.samples += event.samples
        totals.masked_samples += event.masked_samples
        totals.tokens += event.tokens
        if totals.first_step_s is None:
            totals.first_step_s = totals.wall_s
        self._end_step(at_s)
        for prompt_index in event.prompt_indices:
            self._about(prompt_index)
        numbers = (
            *(event.version, at_s, event.reward if event.samples else math.nan),
            *(event.samples, event.tokens, event.masked_samples),
            carried.pause_s if carried.serving else math.nan,
        )
        self._rows.append((numbers, event.staleness))
        carried.version, carried.pause_s = event.version, 0.0

    def _end_step(self, at_s: float) -> None:
        since_s = self.carried.trainer_since_s
        if since_s is not None:
            self._busy.add(_TRAINER, since_s, at_s, at_s - since_s)
            self.carried.trainer_since_s = None

    def _released(self, _event: Released, _before_s: float, at_s: float) -> None:
        self.carried.released_s = self.carried.synced_s = at_s

    def _served(self, event: Served, before_s: float, at_s: float) -> None:
        carried = self.carried
        carried.serving = self.totals.serving = True
        if event.engine not in carried.engines:
            carried.engines.append(event.engine)
        if event.engine in carried.lost:
            carried.lost.remove(event.engine)
            self._note_rare(event, before_s)
        if carried.released_s is not None and event.version == carried.version:
            since_s = max(carried.synced_s, self._began_s)
            self._busy.add(_SYNC, since_s, at_s, at_s - since_s)
            carried.synced_s = at_s

    def _rewound(self, event: Rewound, before_s: float, _at_s: float) -> None:
        # The record may hold millions of groups.
        self._note_rare(msgspec.structs.replace(event, undone=(), rewards=()), before_s)
        while self._rows and self._rows[-1][0][0] > event.to_version:
            self._rows.pop()
        known = self._undone_to
        self._undone_to = event.to_version if known is None else min(known, event.to_version)
        for step in event.undone:
            for prompt_index in step.prompt_indices:
                self._about(prompt_index)
        self.carried.version = event.to_version

    # --- processes and their costs ---------------------------------------------------------------

    def _opened(self, event: Opened, before_s: float, at_s: float) -> None:
        """End all spans that were open at the last record of the former controller."""
        totals, carried = self.totals, self.carried
        if totals.driver not in {None, event.driver}:
            totals.resumes += 1
            totals.tally.forget_processes()
        totals.driver = event.driver
        for engine in list(self._since):
            self._end_of_engine(engine, before_s)
        self._end_step(before_s)
        carried.engine_of.clear()
        self._load.clear()
        carried.serving = totals.serving = False
        carried.released_s = None
        carried.pause_s, carried.lap_s = 0.0, at_s
        self._note_rare(event, before_s)

    def _joined(self, event: Joined, before_s: float, _at_s: float) -> None:
        self.costs.add_process(event.component, event.name, event.incarnation)
        self._note_rare(event, before_s)

    def _worker_lost(self, event: WorkerLost, before_s: float, _at_s: float) -> None:
        self.costs.add_worker_loss(event.worker, event.reason)
        self._note_rare(event, before_s)

    def _engine_lost(self, event: EngineLost, before_s: float, _at_s: float) -> None:
        if event.engine not in self.carried.lost:
            self.carried.lost.append(event.engine)
        self._note_rare(event, before_s)

    def _retired(self, event: Retired, before_s: float, _at_s: float) -> None:
        self.costs.retired[event.engine] = event.reason
        self._note_rare(event, before_s)

    def _trainer_replaced(self, event: TrainerReplaced, before_s: float, at_s: float) -> None:
        self._end_step(at_s)
        self._note_rare(event, before_s)

    def _called_rewards(self, event: RewardCallsMade, _before_s: float, _at_s: float) -> None:
        self.costs.add_reward_calls(event)

    def _spent(self, event: Spent, _before_s: float, at_s: float) -> None:
        self.costs.add_time(event)
        lap_s = max(self.carried.lap_s, self._began_s)
        for bins, spent in ((self._trainer_s, event.trainer), (self._engine_s, event.engines)):
            for category, seconds in spent.items():
                bins.add(category, lap_s, at_s, max(0.0, seconds))
        self.carried.lap_s = at_s

    # --- results ---------------------------------------------------------------------------------

    def end_part(self, first_segment: int = 0) -> Aggregates:
        """Return the sums over the records since the last part, and begin the next part."""
        at_s = self.carried.at_s
        for engine in list(self._since):
            self._end_of_engine(engine, at_s)
            self._since[engine] = at_s
        if self.carried.trainer_since_s is not None:
            self._end_step(at_s)
            self.carried.trainer_since_s = at_s
        all_bins = (self._busy, self._engine_busy, self._trainer_s, self._engine_s)
        align(all_bins)
        busy = self._busy.to_bytes()
        longest = sorted(self._quiet, key=lambda spell: spell[0] - spell[1])[:_QUIET_SPELLS]
        part = Aggregates(
            first_segment=first_segment,
            records=self._records,
            began_unix_s=self._began_s,
            ended_unix_s=at_s,
            lowest_group=-1 if self._highest < 0 else int(self._lowest),
            highest_group=self._highest,
            steps=array("d", (x for numbers, _ in self._rows for x in numbers)).tobytes(),
            staleness=_staleness(self._rows),
            undone_to=self._undone_to,
            rare=tuple(self._rare),
            quiet=tuple(sorted(longest)),
            quiet_left_out=len(self._quiet) - len(longest),
            engines=tuple(sorted(self.carried.engines)),
            width_s=self._busy.width_s,
            trainer_busy=busy.get(_TRAINER, b""),
            sync_busy=busy.get(_SYNC, b""),
            engine_busy=self._engine_busy.to_bytes(),
            trainer_s=self._trainer_s.to_bytes(),
            engine_s=self._engine_s.to_bytes(),
        )
        self._begin_part(at_s)
        return part


def _staleness(rows: Sequence[_StepRow]) -> bytes:
    return array(
        "q",
        (
            number
            for row, (_, staleness) in enumerate(rows)
            for behind, samples in staleness
            for number in (row, behind, samples)
        ),
    ).tobytes()


def summarize(
    table: GroupTable,
    totals: RunTotals,
    *,
    run_id: str,
    name: str,
    steps_asked: int,
    outcome: Literal["finished", "aborted", "failed"],
    error: str | None,
) -> Summary:
    """Return the summary of a run's events, without losses and sync times.

    ``summary.json`` and the end table are made from it. So are a run's page, and the summary of a
    run that lost its controller.
    """
    staleness, costs = table.steps.staleness, totals.tally
    trainer, engines = costs.shares()
    return Summary(
        run_id=run_id,
        name=name,
        outcome=outcome,
        error=error,
        steps=table.trainer_version,
        steps_asked=steps_asked,
        trainer_version=table.trainer_version,
        groups=GroupCounts(**table.counts(), dropped=dict(table.totals.dropped)),
        reward_first=table.steps.mean_first(table.trainer_version),
        reward_last=table.steps.mean_last(table.trainer_version),
        staleness_histogram=staleness,
        max_staleness_trained=max(staleness, default=0),
        masked_samples=totals.masked_samples,
        wall_s=totals.wall_s,
        first_step_s=totals.first_step_s,
        samples_per_s=totals.samples / totals.serving_s if totals.serving_s else 0.0,
        tokens_per_s=totals.tokens / totals.serving_s if totals.serving_s else 0.0,
        trainer_busy_fraction=trainer.pop(TrainerTime.COMPUTE, 0.0),
        generator_busy_fraction=engines.pop(GeneratorTime.COMPUTE, 0.0),
        trainer_waits=trainer,
        generator_waits=engines,
        verdict="" if totals.first_step_s is None else costs.verdict(),
        restarts=costs.restarts.get(Component.ENGINE, 0),
        worker_restarts=costs.restarts.get(Component.WORKER, 0),
        worker_losses=costs.worker_losses,
        workers_lost=sorted(costs.lost_workers),
        trainer_restarts=costs.restarts.get(Component.TRAINER, 0),
        engines_retired=sorted(costs.retired),
        rewinds=table.lineage,
        controller_incarnations=max(1, table.incarnation),
        resumes=totals.resumes,
        weights_digest=table.digest,
    )

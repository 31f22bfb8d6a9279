"""Fold of the records between two snapshots: steps, times, and the rare records themselves.

The journal writes them beside each snapshot, so that whoever looks at a run of millions of groups
reads some kilobytes per snapshot in place of the megabytes of records. Pure: no I/O, no clock.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

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
    Rewound,
    Served,
    Spent,
    StepApplied,
    StepRefused,
    TrainerReplaced,
    Unclaimed,
    WorkerLost,
)
from offbeat.controller.time_bins import TimeBins, align

STEP_FIELDS: Final = (
    *("version", "unix_s", "reward", "samples", "tokens", "masked_samples"),
    "pause_s",  # the longest time without any record; NaN before the first weights were served
)
"""Numbers of a step, in this order in a row of ``Aggregates.steps``."""

QUIET_S: Final = 1.0
"""Shorter times without any record are never a quiet spell."""

_QUIET_SPELLS: Final = 100  # that are kept of each part: the longest


class RareEvent(msgspec.Struct, frozen=True, array_like=True):
    """A record of which a run has few: a process that was lost, came back, or a rewind."""

    version: int  # the trainer's, before it
    before_unix_s: float  # the time of the record before it
    event: AnyEvent


class Aggregates(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the records of some successive segments. Times are times of day."""

    first_segment: int
    records: int
    began_unix_s: float
    ended_unix_s: float
    lowest_group: int  # least and greatest prompt index that a move of these records is about;
    highest_group: int  # -1 if there is none
    steps: bytes  # float64, a row of STEP_FIELDS for each step applied here that stands at the end
    staleness: bytes  # int64, rows of (number of the step's row, versions behind, samples)
    undone_to: int | None  # steps after this version that earlier parts applied are undone
    rare: tuple[RareEvent, ...]
    quiet: tuple[tuple[float, float, int], ...]  # from, to, trainer's version: no record between
    quiet_left_out: int
    engines: tuple[str, ...]  # that have served weights so far
    width_s: float  # of the bins below, which begin at began_unix_s
    trainer_busy: bytes  # float32 per bin: seconds in which a step was open
    sync_busy: bytes  # between a release and the last engine that serves it
    engine_busy: dict[str, bytes]  # in which the engine had a group
    trainer_s: dict[str, bytes]  # seconds of the trainer by TrainerTime
    engine_s: dict[str, bytes]  # of all engines together, by GeneratorTime


class CarriedState(msgspec.Struct):
    """State that a part hands to the next one, and that the group table does not have."""

    version: int = 0
    at_s: float = 0.0  # of the last record
    serving: bool = False  # this incarnation has served weights
    pause_s: float = 0.0  # the longest of the step in progress
    lap_s: float = 0.0  # where the time that the next Spent attributes begins
    trainer_since_s: float | None = None  # when the open step was claimed
    released_s: float | None = None
    synced_s: float = 0.0  # to where the time since the release is counted
    engines: list[str] = []
    lost: list[str] = []
    engine_of: dict[int, str] = {}  # of each group in flight


_StepRow = tuple[tuple[float, ...], tuple[tuple[int, int], ...]]
_RARE: Final = (Opened, Joined, EngineLost, WorkerLost, Retired, TrainerReplaced, Rewound)
_TRAINER: Final = "trainer"
_SYNC: Final = "sync"


class RunAggregates:
    """The fold: takes each record, and ends a part at each snapshot."""

    def __init__(self, carried: CarriedState | None = None) -> None:
        """``carried`` is of the snapshot that the next record follows."""
        self.carried = carried or CarriedState()
        self._load = dict[str, int]()
        self._since = dict[str, float]()  # since when an engine has had a group
        for engine in self.carried.engine_of.values():
            self._load[engine] = self._load.get(engine, 0) + 1
            self._since[engine] = self.carried.at_s
        self._begin(self.carried.at_s)
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
            Released: self._released,
            Served: self._served,
            **dict.fromkeys(_RARE, self._rarely),
        }

    def _begin(self, at_s: float) -> None:
        self._records = 0
        self._began_s = at_s
        self._lowest, self._highest = math.inf, -1
        self._rows = list[_StepRow]()
        self._undone_to: int | None = None
        self._rare = list[RareEvent]()
        self._quiet = list[tuple[float, float, int]]()
        self._busy = TimeBins(at_s)
        self._engine_busy, self._trainer_s, self._engine_s = (TimeBins(at_s) for _ in range(3))

    def take(self, event: Event) -> None:
        """Add the next record."""
        carried = self.carried
        before_s = carried.at_s
        if not before_s and not self._records:  # the first record of the run
            before_s = carried.lap_s = event.unix_s
            self._begin(before_s)
        at_s = max(event.unix_s, before_s)  # a clock that was set back
        self._records += 1
        if at_s - before_s > carried.pause_s:
            self._note_pause(event, before_s, at_s)
        carried.at_s = at_s
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, before_s, at_s)

    def _note_pause(self, event: Event, before_s: float, at_s: float) -> None:
        """Note the longest time without a record in this step so far."""
        carried = self.carried
        carried.pause_s = at_s - before_s
        if carried.pause_s > QUIET_S and carried.serving and not isinstance(event, Opened):
            self._quiet.append((before_s, at_s, carried.version))

    # --- groups and engines ----------------------------------------------------------------------

    def _about(self, prompt_index: int) -> None:
        if not self._lowest <= prompt_index <= self._highest:
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
        self._ended(event.receipt.prompt_index, at_s)

    def _left(self, event: Returned | Dropped, _before_s: float, at_s: float) -> None:
        self._ended(event.prompt_index, at_s)

    def _ended(self, prompt_index: int, at_s: float) -> None:
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

    # --- steps -----------------------------------------------------------------------------------

    def _claimed(self, _event: Claimed, _before_s: float, at_s: float) -> None:
        if self.carried.trainer_since_s is None:
            self.carried.trainer_since_s = at_s

    def _aborted(self, _event: StepRefused | Unclaimed, _before_s: float, at_s: float) -> None:
        self._end_step(at_s)

    def _applied(self, event: StepApplied, _before_s: float, at_s: float) -> None:
        carried = self.carried
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

    def _spent(self, event: Spent, _before_s: float, at_s: float) -> None:
        lap_s = max(self.carried.lap_s, self._began_s)
        for bins, spent in ((self._trainer_s, event.trainer), (self._engine_s, event.engines)):
            for category, seconds in spent.items():
                bins.add(category, lap_s, at_s, max(0.0, seconds))
        self.carried.lap_s = at_s

    def _released(self, _event: Released, _before_s: float, at_s: float) -> None:
        self.carried.released_s = self.carried.synced_s = at_s

    def _served(self, event: Served, before_s: float, at_s: float) -> None:
        carried = self.carried
        carried.serving = True
        if event.engine not in carried.engines:
            carried.engines.append(event.engine)
        if event.engine in carried.lost:
            self._rarely(event, before_s, at_s)
        if carried.released_s is not None and event.version == carried.version:
            since_s = max(carried.synced_s, self._began_s)
            self._busy.add(_SYNC, since_s, at_s, at_s - since_s)
            carried.synced_s = at_s

    # --- what is rare ----------------------------------------------------------------------------

    def _rarely(self, event: AnyEvent, before_s: float, at_s: float) -> None:
        carried = self.carried
        version = carried.version
        match event:
            case Opened():
                self._opened(before_s, at_s)
            case EngineLost():
                if event.engine not in carried.lost:
                    carried.lost.append(event.engine)
            case Served():
                carried.lost.remove(event.engine)
            case TrainerReplaced():
                self._end_step(at_s)
            case Rewound():
                self._rewound(event)
                event = msgspec.structs.replace(event, undone=(), rewards=())  # may be millions
            case _:  # a process that joined, a worker that is lost, an engine that is given up
                pass
        self._rare.append(RareEvent(version, before_s, event))

    def _opened(self, before_s: float, at_s: float) -> None:
        """End what was open with the last record of the controller before."""
        carried = self.carried
        for engine in list(self._since):
            self._end_of_engine(engine, before_s)
        self._end_step(before_s)
        self.carried.engine_of.clear()
        self._load.clear()
        carried.serving, carried.released_s = False, None
        carried.pause_s, carried.lap_s = 0.0, at_s

    def _rewound(self, event: Rewound) -> None:
        while self._rows and self._rows[-1][0][0] > event.to_version:
            self._rows.pop()
        known = self._undone_to
        self._undone_to = event.to_version if known is None else min(known, event.to_version)
        for step in event.undone:
            for prompt_index in step.prompt_indices:
                self._about(prompt_index)
        self.carried.version = event.to_version

    # --- results ---------------------------------------------------------------------------------

    def end_part(self, first_segment: int = 0) -> Aggregates:
        """Return what the records since the last part add up to, and begin the next part."""
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
        self._begin(at_s)
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

"""Audit of the sums that a journal keeps of its records: I22.

The journal writes sums next to each snapshot. Page, ``watch``, ``export`` and ``why`` read them
instead of the records. This audit cuts the product's sums into parts and carries them over restarts
as a journal does. Then it compares them with a plain count of the same records.

The plain count keeps every interval of time as a pair, and every step by its version. It shares no
code with the sums that the journal writes.
"""

import math
import random
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from offbeat.controller import events
from offbeat.controller.events import AnyEvent, Opened
from offbeat.controller.run_stats import RunStats
from offbeat.controller.stats_records import STEP_FIELDS, Aggregates, CarriedState
from offbeat.plugins.simulation.audit_world import Findings, Violation
from offbeat.runs.applied_steps import AppliedSteps

_Interval = tuple[float, float]


class PlainPart(msgspec.Struct):
    """Sums over the records of one part."""

    records: int
    began_s: float
    ended_s: float
    lowest: int = -1
    highest: int = -1
    undone_to: int | None = None
    engines: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()
    trainer_busy_s: float = 0.0
    sync_busy_s: float = 0.0
    engine_busy_s: dict[str, float] = {}
    trainer_s: dict[str, float] = {}
    engine_s: dict[str, float] = {}


class PlainSums:
    """The count over all parts so far. Times come from the records, but never go back."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}  # by version, without undone ones
        self._now: float | None = None
        self._gaps: list[float] = []  # between the records of the step in progress
        self._is_serving = False
        self._version = 0
        self._served: set[str] = set()
        self._lost: set[str] = set()
        self._engine_of: dict[int, str] = {}  # of each group in flight
        self._step_since: float | None = None
        self._release_since: float | None = None

    def part(self, journal: Sequence[AnyEvent]) -> PlainPart:
        """Count the records of the next part."""
        first_s = journal[0].unix_s if self._now is None else self._now
        part = PlainPart(len(journal), first_s, first_s)
        groups, rare = list[int](), list[str]()
        steps, syncs, engines = list[_Interval](), list[_Interval](), dict[str, list[_Interval]]()
        for event in journal:
            before = first_s if self._now is None else self._now
            now = max(before, event.unix_s)
            self._gaps.append(now - before)
            # Between two controllers, the activity of actors is unknown.
            if not isinstance(event, events.Opened):
                for engine in set(self._engine_of.values()):
                    engines.setdefault(engine, []).append((before, now))
            groups += _named(event)
            if self._is_rare(event):
                rare.append(type(event).__name__)
            self._train(event, before, now, part, steps)
            self._sync(event, now, syncs)
            self._roll_out(event)
            self._now = now
        part.ended_s = first_s if self._now is None else self._now
        if self._step_since is not None:
            steps.append((self._step_since, part.ended_s))
            self._step_since = part.ended_s
        part.lowest, part.highest = (min(groups), max(groups)) if groups else (-1, -1)
        part.engines, part.rare = tuple(sorted(self._served)), tuple(rare)
        part.trainer_busy_s = _length(steps)
        part.sync_busy_s = _length([(max(since, part.began_s), until) for since, until in syncs])
        part.engine_busy_s = {name: _length(spans) for name, spans in engines.items()}
        return part

    def _is_rare(self, event: AnyEvent) -> bool:
        """Return whether a page shows the record itself: processes, rewinds, returning engines."""
        if isinstance(event, events.EngineLost):
            self._lost.add(event.engine)
        if isinstance(event, events.Served):
            is_back = event.engine in self._lost
            self._lost.discard(event.engine)
            return is_back
        replaced = events.Joined | events.Retired | events.TrainerReplaced
        lost = events.EngineLost | events.WorkerLost
        return isinstance(event, events.Opened | events.Rewound | replaced | lost)

    def _roll_out(self, event: AnyEvent) -> None:
        match event:
            case events.Dispatched():
                self._engine_of[event.prompt_index] = event.engine
            case events.Committed():
                self._engine_of.pop(event.receipt.prompt_index, None)
            case events.Returned() | events.Dropped():
                self._engine_of.pop(event.prompt_index, None)
            case events.Opened():
                self._engine_of.clear()
            case _:
                pass

    def _train(
        self, event: AnyEvent, before: float, now: float, part: PlainPart, steps: list[_Interval]
    ) -> None:
        """Count the steps, the time in which one was open, and the attributed time."""
        undone = events.StepRefused | events.Unclaimed | events.TrainerReplaced
        ends = isinstance(event, events.StepApplied | events.Opened | undone)
        if self._step_since is not None and ends:
            steps.append((self._step_since, before if isinstance(event, events.Opened) else now))
            self._step_since = None
        match event:
            case events.Claimed():
                self._step_since = now if self._step_since is None else self._step_since
            case events.StepApplied():
                pause_s = max(self._gaps) if self._is_serving else math.nan
                self.steps[event.version] = _row(event, now, pause_s)
                self._version, self._gaps = event.version, []
            case events.Opened():
                self._is_serving, self._gaps = False, []
            case events.Rewound():
                known = part.undone_to
                part.undone_to = min(event.to_version, event.to_version if known is None else known)
                self._version = event.to_version
                self.steps = {at: row for at, row in self.steps.items() if at <= event.to_version}
            case events.Spent():
                _add(part.trainer_s, event.trainer)
                _add(part.engine_s, event.engines)
            case _:
                pass

    def _sync(self, event: AnyEvent, now: float, syncs: list[_Interval]) -> None:
        """Count the time from a release to the last engine that serves its version."""
        match event:
            case events.Released():
                self._release_since = now
            case events.Served():
                self._is_serving = True
                self._served.add(event.engine)
                if self._release_since is not None and event.version == self._version:
                    syncs.append((self._release_since, now))
                    self._release_since = now
            case events.Opened():
                self._release_since = None
            case _:
                pass


def _row(event: events.StepApplied, now: float, pause_s: float) -> dict[str, float]:
    ages = [(behind, samples) for behind, samples in event.staleness if samples > 0]
    summed = sum(behind * samples for behind, samples in ages)
    return {
        "version": event.version,
        "unix_s": now,
        "reward": event.reward if event.samples else math.nan,
        "samples": event.samples,
        "tokens": event.tokens,
        "masked_samples": event.masked_samples,
        "pause_s": pause_s,
        "staleness_mean": summed / event.samples if event.samples else math.nan,
        "staleness_max": max((behind for behind, _ in ages), default=math.nan),
    }


def _named(event: AnyEvent) -> list[int]:
    """Return the groups that the record moves by name."""
    match event:
        case events.Admitted() | events.Dispatched() | events.Returned() | events.Dropped():
            return [event.prompt_index]
        case events.Committed():
            return [event.receipt.prompt_index]
        case events.StepApplied():
            return list(event.prompt_indices)
        case events.Rewound():
            return [index for step in event.undone for index in step.prompt_indices]
        case _:
            return []


def _length(spans: Sequence[_Interval]) -> float:
    return math.fsum(until - since for since, until in spans)


def _add(sums: dict[str, float], seconds: dict[str, float]) -> None:
    for name, each_s in seconds.items():
        sums[name] = sums.get(name, 0.0) + max(0.0, each_s)


_EPOCH_S: Final = 1e9
_PART_RECORDS: Final = (3, 40, 300)
_TOLERANCE: Final = 1e-3  # relative, because float32 bins round seconds
_ENCODER: Final = msgspec.msgpack.Encoder()


def audit_aggregates(
    journal: Sequence[AnyEvent], fold: type[RunStats] = RunStats
) -> list[Violation]:
    """Return where the sums of a journal differ from a plain count of its records.

    The records of an episode have no time of day, so the audit adds times, and sometimes sets the
    clock back. A test may substitute another ``fold``.
    """
    findings = Findings()
    findings.source = "parts"
    rng = random.Random(len(journal))
    written = _with_times(journal, rng)
    cuts = _cuts(written, rng)
    parts = list(_written_parts(written, cuts, fold))
    plain = PlainSums()
    counted = [plain.part(written[start:stop]) for start, stop in cuts]
    for findings.index, (part, expected) in enumerate(zip(parts, counted, strict=True)):
        findings.current = part
        for problem in _differences(part, expected):
            findings.add("I22", problem)
    findings.index = len(parts)
    for problem in _differing_steps(AppliedSteps(parts), plain):
        findings.add("I22", problem)
    return findings.violations


def _with_times(journal: Iterable[AnyEvent], rng: random.Random) -> list[AnyEvent]:
    """Return the records, each with a time of day, which is sometimes set back."""
    now, timed = _EPOCH_S, list[AnyEvent]()
    for event in journal:
        now += rng.choice((0.0, 0.001, 0.05, 0.3, 0.3, 2.5))
        back = 5.0 if rng.random() < 0.01 else 0.0  # noqa: PLR2004
        timed.append(msgspec.structs.replace(event, unix_s=now - back))
    return timed


def _cuts(events: Sequence[AnyEvent], rng: random.Random) -> list[tuple[int, int]]:
    """Return where the parts begin and end: between any two records."""
    cuts, start = list[tuple[int, int]](), 0
    while start < len(events):
        stop = min(len(events), start + rng.randint(1, rng.choice(_PART_RECORDS)))
        cuts.append((start, stop))
        start = stop
    return cuts


def _written_parts(
    events: Sequence[AnyEvent], cuts: Iterable[tuple[int, int]], fold: type[RunStats]
) -> Iterable[Aggregates]:
    """Yield the product's sums of each part, as a reader of its file would get them.

    A controller that succeeds another reads the state next to the last snapshot, and the records
    since.
    """
    sums, saved = fold(), b""
    for start, stop in cuts:
        for place in range(start, stop):
            if place and isinstance(events[place], Opened):
                sums = fold(
                    carried=msgspec.msgpack.decode(saved, type=CarriedState) if saved else None
                )
                for event in events[start:place]:
                    sums.add(event)
            sums.add(events[place])
        part = sums.end_part(1)
        saved = _ENCODER.encode(sums.carried)
        yield msgspec.msgpack.decode(_ENCODER.encode(part), type=Aggregates)


def _differences(part: Aggregates, expected: PlainPart) -> Iterable[str]:
    """Yield a sentence for each sum of a part that differs from its records."""
    sums = {
        "records": (part.records, expected.records),
        "times": ((part.began_unix_s, part.ended_unix_s), (expected.began_s, expected.ended_s)),
        "groups": ((part.lowest_group, part.highest_group), (expected.lowest, expected.highest)),
        "undone_to": (part.undone_to, expected.undone_to),
        "engines": (part.engines, expected.engines),
        "rare": (tuple(type(each.event).__name__ for each in part.rare), expected.rare),
    }
    for name, (written, counted) in sums.items():
        if written != counted:
            yield f"{name} of the part are {written}; its records have {counted}"
    for name, written_s, counted_s in (
        ("trainer_busy", _seconds(part.trainer_busy), expected.trainer_busy_s),
        ("sync_busy", _seconds(part.sync_busy), expected.sync_busy_s),
        *_by_name("engine_busy", part.engine_busy, expected.engine_busy_s),
        *_by_name("trainer_s", part.trainer_s, expected.trainer_s),
        *_by_name("engine_s", part.engine_s, expected.engine_s),
    ):
        if not math.isclose(written_s, counted_s, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            yield f"{name} of the part is {written_s:g} s; its records have {counted_s:g} s"


def _by_name(
    name: str, written: dict[str, bytes], counted: dict[str, float]
) -> Iterable[tuple[str, float, float]]:
    for key in sorted({*written, *counted}):
        yield f"{name} of {key}", _seconds(written.get(key, b"")), counted.get(key, 0.0)


def _seconds(bins: bytes) -> float:
    return math.fsum(memoryview(bins).cast("f"))


def _differing_steps(steps: AppliedSteps, plain: PlainSums) -> Iterable[str]:
    """Yield a sentence for each differing column of the steps, as a page reads them."""
    counted = [plain.steps[version] for version in sorted(plain.steps)]
    columns = {name: steps.field(name).tolist() for name in STEP_FIELDS}
    read = steps.columns()
    columns |= {
        name: read[f"off_policy/{name}"].tolist() for name in ("staleness_mean", "staleness_max")
    }
    for name, written in columns.items():
        expected = [step[name] for step in counted]
        if len(written) != len(expected):
            yield f"{len(written)} steps stand by the parts; by the records {len(expected)}"
            return
        for step, one, other in zip(counted, written, expected, strict=True):
            if not (
                math.isclose(one, other, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))
            ):
                yield f"{name} of version {step['version']:g} is {one:g}; its records have {other:g}"

"""Computes the time line of a run from the parts of its journal: lanes, incidents, attributed time.

Shares of time: the part of each of many equal intervals by activity. Pure.
"""

import enum
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.controller.events import (
    AnyEvent,
    EngineLost,
    Joined,
    Opened,
    Retired,
    Rewound,
    Served,
    TrainerReplaced,
    WorkerLost,
)
from offbeat.controller.run_stats import QUIET_S
from offbeat.controller.stats_records import Aggregates, RareEvent
from offbeat.messages.failures import Component
from offbeat.runs.applied_steps import PAUSE, read_steps
from offbeat.telemetry.time_accounting import GeneratorTime, TrainerTime

Floats = NDArray[np.float64]
Spans = Sequence[tuple[float, float]]


def covered_shares(spans: Spans, end_s: float, intervals: int) -> Floats:
    """Return the share of each interval of ``[0, end_s]`` that disjoint, ascending spans cover."""
    pieces = [(start, end, end - start, np.array([end - start])) for start, end in spans]
    return np.clip(per_interval(pieces, end_s, intervals) * intervals / (end_s or 1.0), 0.0, 1.0)


def merged(spans: Spans, gap_s: float = 0.0) -> list[tuple[float, float]]:
    """Return the union of spans as disjoint spans, ascending. Gaps up to ``gap_s`` are closed."""
    union = list[tuple[float, float]]()
    for start, end in sorted(spans):
        if union and start <= union[-1][1] + gap_s:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


BinnedSeconds = tuple[float, float, float, NDArray[np.floating]]
"""Bins of one stretch of time: its begin and end, the width of a bin, seconds per bin."""


def per_interval(pieces: Sequence[BinnedSeconds], end_s: float, intervals: int) -> Floats:
    """Return per interval of ``[0, end_s]`` the seconds in bins, spread evenly over each bin.

    Pieces are ascending and do not overlap.
    """
    edges = np.linspace(0.0, end_s, intervals + 1)
    if not pieces or end_s <= 0:
        return np.zeros(intervals)
    times, reached = list[Floats](), list[Floats]()
    total = 0.0
    for began_s, ended_s, width_s, seconds in pieces:
        ends = began_s + width_s * np.arange(len(seconds) + 1)
        times.append(np.minimum(ends, max(ended_s, began_s)))
        sums = total + np.concatenate(([0.0], np.cumsum(seconds, dtype=np.float64)))
        reached.append(sums)
        total = float(sums[-1])
    return np.diff(np.interp(edges, np.concatenate(times), np.concatenate(reached)))


CONTROLLER: Final = "controller"
TRAINER: Final = "trainer"
SYNC: Final = "weight sync"
INTERVALS: Final = 600  # intervals of a lane; a screen is hardly wider
_DRAWN: Final = 2 * INTERVALS  # shorter gaps between two losses are not drawn
STACK_INTERVALS: Final = 150  # intervals of the attributed time, which changes from step to step

_QUIET_MEDIANS: Final = 4  # multiple of the median longest pause between two records in a step
_CLOSE_S: Final = 0.1  # a pause may begin or end slightly outside of the loss that explains it
_LISTED_INCIDENTS: Final = 500
_LONGEST_DETAIL: Final = 600  # characters


class IncidentKind(enum.StrEnum):
    """Kind of an incident, in the words of the page."""

    ENGINE_LOST = "engine lost"
    ENGINE_RETIRED = "engine retired"
    WORKER_LOST = "worker lost"
    WORKER_REPLACED = "worker replaced"
    TRAINER_LOST = "trainer lost"
    CONTROLLER_LOST = "controller lost"
    REWOUND = "rewound"
    RESUMED = "resumed"
    QUIET = "quiet"

    @property
    def is_loss(self) -> bool:
        """Return whether a process is missing until another replaces it."""
        return self in _LOSSES

    @property
    def is_failure(self) -> bool:
        """Return whether a process failed. A rewind, a resume and a pause are not failures."""
        return self not in _NO_FAILURES


_LOSSES: Final = frozenset(
    {
        IncidentKind.ENGINE_LOST,
        IncidentKind.WORKER_LOST,
        IncidentKind.TRAINER_LOST,
        IncidentKind.CONTROLLER_LOST,
    }
)
_NO_FAILURES: Final = frozenset({IncidentKind.REWOUND, IncidentKind.RESUMED, IncidentKind.QUIET})


class Incident(msgspec.Struct):
    """A failure or interruption, and when it ended."""

    at_s: float
    step: int
    what: IncidentKind
    who: str
    detail: str
    back_s: float | None = None  # when it ended; None: not yet, or nothing was down

    @property
    def is_down(self) -> bool:
        """Return whether the lost process has no successor yet."""
        return self.back_s is None and self.what.is_loss


class UptimeLane(msgspec.Struct):
    """One row of the time line."""

    name: str
    busy: Floats  # busy share of each interval
    down: list[tuple[float, float]]


class Timeline:
    """Lanes and incidents of a run. Times are seconds since its first record."""

    def __init__(self, parts: Sequence[Aggregates]) -> None:
        self._parts = parts
        self.began_unix_s = parts[0].began_unix_s if parts else 0.0
        self.end_s = parts[-1].ended_unix_s - self.began_unix_s if parts else 0.0
        self._incidents = list[Incident]()  # in the order of the events
        self.engines = sorted(
            {engine for part in parts for engine in (*part.engines, *part.engine_busy)}
        )
        """Every engine that served weights or received a group."""
        self._version = 0  # trainer version before the event
        self._down = defaultdict[str, list[tuple[float, float]]](list)
        self._lost = dict[str, Incident]()
        self._processes = dict[str, str]()
        self._up = defaultdict[str, list[tuple[float, float]]](list)
        """Times at which each ended controller and worker was up."""
        self._up_since = dict[str, float]()  # start of each controller and worker that is up
        self._driver = ""
        self._is_resumed = False  # in the newest incarnation
        for part in parts:
            for rare in part.rare:
                self._version = rare.version
                self._take(rare.event, *map(self._since_began, _times(rare)))
        self.quiet_after_s = _quiet_after_s(parts)
        """Minimum length of a pause without any record that counts as a quiet spell."""
        self._spells = self._quiet_spells()
        self.counts = Counter(each.what for each in (*self._incidents, *self._spells))
        """Number of all incidents and quiet spells by kind, including unlisted ones."""

    def _since_began(self, unix_s: float) -> float:
        return max(0.0, unix_s - self.began_unix_s)

    # --- what fails ------------------------------------------------------------------------------

    def _take(self, event: AnyEvent, before_s: float, at_s: float) -> None:
        match event:
            case Opened():
                self._opened(event, before_s, at_s)
            case Served():
                self._back(event.engine, at_s)
            case EngineLost():
                self._gone(event.engine, at_s, IncidentKind.ENGINE_LOST, event.reason)
            case WorkerLost():
                self._end_uptime(event.worker, at_s)
                self._gone(event.worker, at_s, IncidentKind.WORKER_LOST, event.reason)
            case Retired():
                lost = self._lost.get(event.engine)
                if lost is not None:
                    lost.what = IncidentKind.ENGINE_RETIRED
            case TrainerReplaced():
                self._trainer_lost(event, at_s)
            case Rewound():
                detail = f"to version {event.target}: {event.reason}"
                self._add(at_s, IncidentKind.REWOUND, TRAINER, detail)
            case Joined():
                self._joined(event, at_s)
            case _:
                pass

    def _trainer_lost(self, event: TrainerReplaced, at_s: float) -> None:
        """Add the loss of a trainer. A trainer that a new controller replaces is already back.

        The trainer of a resumed run is always new, and a loss that a former controller recorded
        ended when the new process joined.
        """
        lost_s = at_s
        if event.found:
            began_s = self._up_since.get(CONTROLLER, 0.0)
            is_known = any(end_s >= began_s for _, end_s in self._down[TRAINER])
            if self._is_resumed or is_known:
                return
            lost_s = self._down[CONTROLLER][-1][0] if self._down[CONTROLLER] else began_s
        self._gone(TRAINER, lost_s, IncidentKind.TRAINER_LOST, event.reason)
        if event.found:
            self._back(TRAINER, at_s)

    def _joined(self, event: Joined, at_s: float) -> None:
        before = self._processes.get(event.name)
        self._processes[event.name] = event.incarnation
        if event.component is Component.TRAINER:
            self._back(TRAINER, at_s)
        if event.component is Component.WORKER:
            is_known = event.name in self._lost or before in {None, event.incarnation}
            if not is_known:  # a journal without records of lost workers
                detail = "another process answers under its name"
                self._add(at_s, IncidentKind.WORKER_REPLACED, event.name, detail)
            self._back(event.name, at_s)
            self._up_since.setdefault(event.name, at_s)

    def _end_uptime(self, who: str, at_s: float) -> None:
        since_s = self._up_since.pop(who, None)
        if since_s is not None:
            self._up[who].append((since_s, at_s))

    def _opened(self, event: Opened, ended_s: float, at_s: float) -> None:
        """Begin an incarnation. ``ended_s`` is the time of the previous one's last record."""
        if CONTROLLER in self._up_since:
            self._end_uptime(CONTROLLER, ended_s)
            resumed = self._is_resumed = event.driver != self._driver
            kind = IncidentKind.RESUMED if resumed else IncidentKind.CONTROLLER_LOST
            detail = f"incarnation {event.incarnation} took over"
            self._add(ended_s, kind, CONTROLLER, detail, back_s=at_s)
            self._down[CONTROLLER].append((ended_s, at_s))
            if resumed:
                self._processes.clear()
                for worker in list(self._up_since):
                    self._end_uptime(worker, ended_s)
                for who in list(self._lost):
                    self._back(who, at_s)
        self._up_since[CONTROLLER] = at_s
        self._driver = event.driver

    def _gone(self, who: str, at_s: float, kind: IncidentKind, detail: str) -> None:
        incident = self._add(at_s, kind, who, detail)
        self._lost.setdefault(
            who, incident
        )  # a second loss before the first ended is part of the first

    def _back(self, who: str, at_s: float) -> None:
        incident = self._lost.pop(who, None)
        if incident is not None:
            incident.back_s = at_s
            self._down[who].append((incident.at_s, at_s))

    def _add(
        self, at_s: float, kind: IncidentKind, who: str, detail: str, back_s: float | None = None
    ) -> Incident:
        detail = detail[:_LONGEST_DETAIL]
        incident = Incident(at_s, self._version, kind, who, detail, back_s)
        self._incidents.append(incident)
        return incident

    def _quiet_spells(self) -> list[Incident]:
        """Return the quiet spells, except spells during the loss of a trainer or a controller."""
        known = [self._spans_down(lane) for lane in (TRAINER, CONTROLLER)]
        pauses = [
            (self._since_began(start), self._since_began(end), version)
            for part in self._parts
            for start, end, version in part.quiet
        ]
        return [
            Incident(
                start, version, IncidentKind.QUIET, "all", f"no record for {end - start:.1f} s", end
            )
            for start, end, version in pauses
            if end - start > self.quiet_after_s
            and not any(_lies_in(spans, start, end) for spans in known)
        ]

    # --- results ---------------------------------------------------------------------------------

    @property
    def incidents(self) -> list[Incident]:
        """Return the listed incidents: the newest, and all that have not ended."""
        older, newest = self._incidents[:-_LISTED_INCIDENTS], self._incidents[-_LISTED_INCIDENTS:]
        return [*(each for each in older if each in self._lost.values()), *newest]

    @property
    def left_out(self) -> int:
        """Return the number of incidents and quiet spells that are not listed.

        A part of the journal keeps only its longest pauses. If all of these are quiet spells, its
        other pauses are counted as spells, too.
        """
        full = (
            part.quiet_left_out
            for part in self._parts
            if part.quiet and min(end - start for start, end, _ in part.quiet) > self.quiet_after_s
        )
        return self.counts.total() + sum(full) - len(self.all_incidents())

    def all_incidents(self) -> list[Incident]:
        """Return the listed incidents and the longest quiet spells, ascending."""
        longest = sorted(self._spells, key=lambda spell: spell.at_s - (spell.back_s or 0.0))
        listed = [*self.incidents, *longest[:_LISTED_INCIDENTS]]
        return sorted(listed, key=lambda incident: incident.at_s)

    def _spans_down(self, lane: str) -> list[tuple[float, float]]:
        still = [(lost.at_s, self.end_s) for who, lost in self._lost.items() if who == lane]
        return merged([*self._down[lane], *still])

    def lanes(self) -> list[UptimeLane]:
        """Return controller, trainer, weight sync, engines and workers, in this order.

        A worker counts as busy while it is up, like a controller, because no record names the
        worker of a group.
        """
        busy = {
            CONTROLLER: self._uptime(CONTROLLER),
            TRAINER: self._shares([part.trainer_busy for part in self._parts], INTERVALS),
            SYNC: self._shares([part.sync_busy for part in self._parts], INTERVALS),
        }
        for engine in self.engines:
            bins = [part.engine_busy.get(engine, b"") for part in self._parts]
            busy[engine] = self._shares(bins, INTERVALS)
        for worker in sorted({*self._up, *self._up_since} - {CONTROLLER}):
            busy[worker] = self._uptime(worker)
        return [UptimeLane(name, share, self._spans_down(name)) for name, share in busy.items()]

    def _uptime(self, who: str) -> Floats:
        """Return the share of each interval in which a controller or worker was up."""
        since_s = self._up_since.get(who, self.end_s)
        return covered_shares(
            merged([*self._up[who], (since_s, self.end_s)]), self.end_s, INTERVALS
        )

    def attribution(self) -> dict[str, dict[str, Floats]]:
        """Return for trainer and engines the share of each interval by category.

        Shares below 1 in total mean that no controller was up to record the rest.
        """
        trainer, engines = dict[str, Floats](), dict[str, Floats]()
        count = max(1, len(self.engines))
        for each in TrainerTime:
            bins = [part.trainer_s.get(each.value, b"") for part in self._parts]
            trainer[each.value] = self._shares(bins, STACK_INTERVALS)
        for each in GeneratorTime:
            bins = [part.engine_s.get(each.value, b"") for part in self._parts]
            engines[each.value] = self._shares(bins, STACK_INTERVALS) / count
        return {TRAINER: _not_zero(trainer), "engines": _not_zero(engines)}

    def _shares(self, bins: Sequence[bytes], intervals: int) -> Floats:
        """Return the part of each interval that the bins cover in total."""
        pieces = [
            (part.began_unix_s - self.began_unix_s, part.ended_unix_s - self.began_unix_s,
             part.width_s, np.frombuffer(each, "<f4"))
            for part, each in zip(self._parts, bins, strict=True)
            if each
        ]  # fmt: skip
        width_s = self.end_s / intervals or 1.0
        return per_interval(pieces, self.end_s, intervals) / width_s

    def to_facts(self) -> dict[str, Any]:
        """Return everything as plain values and arrays, for the page."""
        return {
            "end_s": self.end_s,
            "quiet_after_s": self.quiet_after_s,
            "lanes": [
                {
                    "name": lane.name,
                    "busy": as_bytes(lane.busy),
                    "down": merged(lane.down, self.end_s / _DRAWN),
                }
                for lane in self.lanes()
            ],
            "incidents": [
                msgspec.structs.asdict(each) | {"is_down": each.is_down}
                for each in self.all_incidents()
            ],
            "incidents_left_out": self.left_out,
            "attribution": {
                who: [{"name": name, "share": as_bytes(share)} for name, share in shares.items()]
                for who, shares in self.attribution().items()
            },
        }


def _quiet_after_s(parts: Sequence[Aggregates]) -> float:
    """Return the minimum length of a quiet spell: a multiple of the median longest pause.

    The median is over the longest pause of each step.
    """
    pauses = [read_steps(part)[:, PAUSE] for part in parts]
    known = np.concatenate(pauses) if pauses else np.zeros(0)
    known = known[np.isfinite(known)]
    median = float(np.median(known)) if len(known) else 0.0
    return max(QUIET_S, _QUIET_MEDIANS * median)


def _lies_in(spans: Sequence[tuple[float, float]], start_s: float, end_s: float) -> bool:
    """Return whether one of disjoint, ascending spans covers a pause."""
    before = bisect_right(spans, (start_s + _CLOSE_S, float("inf")))
    return before > 0 and end_s <= spans[before - 1][1] + _CLOSE_S


def _times(rare: RareEvent) -> tuple[float, float]:
    """Return the time of the record before a rare record, and of the rare record."""
    return rare.before_unix_s, max(rare.before_unix_s, rare.event.unix_s)


def _not_zero(shares: dict[str, Floats]) -> dict[str, Floats]:
    return {name: np.clip(share, 0, 1) for name, share in shares.items() if share.any()}


def as_bytes(shares: Floats) -> Any:  # noqa: ANN401  an array of numpy has a type of its own
    """Return shares as bytes, with 255 for 1. No chart shows a finer difference."""
    return np.rint(np.clip(np.nan_to_num(shares), 0, 1) * 255).astype(np.uint8)

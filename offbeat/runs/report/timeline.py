"""Folds a journal into what was up when: lanes, incidents, quiet spells, attributed time. Pure."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np

from offbeat.controller.events import (
    AnyEvent,
    Claimed,
    Committed,
    Dispatched,
    EngineLost,
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
)
from offbeat.messages.failures import Component
from offbeat.runs.report.shares import Floats, covered_shares, merged, spread
from offbeat.telemetry.time_accounting import GeneratorTime, TrainerTime

CONTROLLER: Final = "controller"
TRAINER: Final = "trainer"
SYNC: Final = "weight sync"
INTERVALS: Final = 600  # of a lane; a screen is hardly wider
STACK_INTERVALS: Final = 150  # of the attributed time, which changes from step to step

_QUIET_S: Final = 1.0
_QUIET_MEDIANS: Final = 4  # of the longest pause between two records in a step
_LISTED_INCIDENTS: Final = 500
_LONGEST_DETAIL: Final = 600  # characters


class Incident(msgspec.Struct):
    """Something that went wrong, and when it was over."""

    at_s: float
    step: int
    what: str
    who: str
    detail: str
    back_s: float | None = None  # when it was over; None: not yet, or nothing was down


class UptimeLane(msgspec.Struct):
    """One row of the time line."""

    name: str
    busy: Floats  # share of each interval
    down: list[tuple[float, float]]


class Timeline:
    """The fold. Times are seconds since the first event."""

    def __init__(self) -> None:
        self.end_s = 0.0
        self.version = 0
        self.incidents = list[Incident]()
        self.dropped_incidents = 0
        """Incidents beyond those listed."""
        self._busy = defaultdict[str, list[tuple[float, float]]](list)
        self._down = defaultdict[str, list[tuple[float, float]]](list)
        self._out = dict[int, str]()  # engine of each group in flight
        self._load = dict[str, int]()  # groups in flight by engine
        self._since = dict[str, float]()  # when an engine's load, or a step, began
        self._lost = dict[str, Incident]()
        self._processes = dict[str, str]()
        self._incarnations = list[list[float]]()
        self._driver = ""
        self._released_s: float | None = None
        self._serving = False  # this incarnation has served weights
        self._laps_from_s = 0.0
        self._trainer = defaultdict[str, list[tuple[float, float, float]]](list)
        self._engines = defaultdict[str, list[tuple[float, float, float]]](list)
        self._pause = 0.0  # longest pause between two records in this step
        self._pauses = list[float]()
        self._candidates = list[tuple[float, float, int]]()  # pauses over _QUIET_S

    @property
    def engines(self) -> list[str]:
        """Return the names of the engines that were ever sent a group."""
        return sorted(self._load)

    def take(self, event: AnyEvent, at_s: float) -> None:
        """Add the next event."""
        self._note_pause(event, at_s)
        self._fold(event, at_s)
        self.end_s = max(self.end_s, at_s)

    def _fold(self, event: AnyEvent, at_s: float) -> None:
        match event:
            case Dispatched():
                self._dispatched(event, at_s)
            case Committed():
                self._ended(event.receipt.prompt_index, at_s)
            case Returned():
                self._ended(event.prompt_index, at_s)
            case Claimed():
                self._since.setdefault(TRAINER, at_s)
            case StepApplied() | StepRefused() | Unclaimed():
                self._stepped(event, at_s)
            case Spent():
                self._spent(event, at_s)
            case Opened():
                self._opened(event, at_s)
            case Released():
                self._released_s = at_s
            case Served():
                self._served(event, at_s)
            case _:
                self._failed(event, at_s)

    # --- what works ------------------------------------------------------------------------------

    def _dispatched(self, event: Dispatched, at_s: float) -> None:
        engine = event.engine
        self._out[event.prompt_index] = engine
        load = self._load.get(engine, 0)
        if not load:
            self._since[engine] = at_s
        self._load[engine] = load + 1

    def _ended(self, prompt_index: int, at_s: float) -> None:
        engine = self._out.pop(prompt_index, None)
        if engine is not None:
            self._load[engine] -= 1
            if not self._load[engine]:
                self._end_of(engine, at_s)

    def _stepped(self, event: StepApplied | StepRefused | Unclaimed, at_s: float) -> None:
        self._end_of(TRAINER, at_s)
        if isinstance(event, StepApplied):
            self.version = event.version
            if self._serving:
                self._pauses.append(self._pause)
            self._pause = 0.0

    def _end_of(self, lane: str, at_s: float) -> None:
        began_s = self._since.pop(lane, None)
        if began_s is not None:
            self._busy[lane].append((began_s, at_s))

    def _spent(self, event: Spent, at_s: float) -> None:
        for laps, seconds in ((self._trainer, event.trainer), (self._engines, event.engines)):
            for category, value in seconds.items():
                laps[category].append((self._laps_from_s, at_s, max(0.0, value)))
        self._laps_from_s = at_s

    def _served(self, event: Served, at_s: float) -> None:
        self._serving = True
        self._load.setdefault(event.engine, 0)
        self._back(event.engine, at_s)
        if self._released_s is not None and event.version == self.version:
            self._busy[SYNC].append((self._released_s, at_s))

    # --- what fails ------------------------------------------------------------------------------

    def _failed(self, event: AnyEvent, at_s: float) -> None:
        match event:
            case EngineLost():
                self._gone(
                    event.engine,
                    Incident(at_s, self.version, "engine lost", event.engine, event.reason),
                )
            case Retired():
                lost = self._lost.get(event.engine)
                if lost is not None:
                    lost.what = "engine retired"
            case TrainerReplaced():
                self._end_of(TRAINER, at_s)
                self._gone(
                    TRAINER, Incident(at_s, self.version, "trainer lost", TRAINER, event.reason)
                )
            case Rewound():
                detail = f"to version {event.target}: {event.reason}"
                self._add(Incident(at_s, self.version, "rewound", TRAINER, detail))
                self.version = event.to_version
            case Joined():
                self._joined(event, at_s)
            case _:
                pass

    def _joined(self, event: Joined, at_s: float) -> None:
        before = self._processes.get(event.name)
        self._processes[event.name] = event.incarnation
        if event.component is Component.TRAINER:
            self._back(TRAINER, at_s)
        if event.component is Component.WORKER and before not in {None, event.incarnation}:
            detail = "another process answers under its name"
            self._add(Incident(at_s, self.version, "worker replaced", event.name, detail))

    def _opened(self, event: Opened, at_s: float) -> None:
        """Begin an incarnation: nothing that was open in the one before goes on."""
        if self._incarnations:
            ended_s = self._incarnations[-1][1] = self.end_s
            resumed = event.driver != self._driver
            what = "resumed" if resumed else "controller lost"
            detail = f"incarnation {event.incarnation} took over"
            self._add(Incident(ended_s, self.version, what, CONTROLLER, detail, at_s))
            self._down[CONTROLLER].append((ended_s, at_s))
            for lane in (*self._load, TRAINER):
                self._end_of(lane, ended_s)
            self._out.clear()
            self._load = dict.fromkeys(self._load, 0)
            if resumed:
                self._processes.clear()
                for who in list(self._lost):
                    self._back(who, at_s)
        self._incarnations.append([at_s, at_s])
        self._driver, self._serving, self._released_s = event.driver, False, None
        self._laps_from_s, self._pause = at_s, 0.0

    def _gone(self, who: str, incident: Incident) -> None:
        if who not in self._lost:  # a second loss before it was back is part of the first
            self._lost[who] = incident
        self._add(incident)

    def _back(self, who: str, at_s: float) -> None:
        incident = self._lost.pop(who, None)
        if incident is not None:
            incident.back_s = at_s
            self._down[who].append((incident.at_s, at_s))

    def _add(self, incident: Incident) -> None:
        incident.detail = incident.detail[:_LONGEST_DETAIL]
        if len(self.incidents) < _LISTED_INCIDENTS:
            self.incidents.append(incident)
        else:
            self.dropped_incidents += 1

    def _note_pause(self, event: AnyEvent, at_s: float) -> None:
        pause_s = at_s - self.end_s
        self._pause = max(self._pause, pause_s)
        if pause_s > _QUIET_S and self._serving and not isinstance(event, Opened):
            self._candidates.append((self.end_s, at_s, self.version))

    # --- results ---------------------------------------------------------------------------------

    @property
    def quiet_after_s(self) -> float:
        """Return the length beyond which a pause without any record counts as a quiet spell."""
        median = float(np.median(self._pauses)) if self._pauses else 0.0
        return max(_QUIET_S, _QUIET_MEDIANS * median)

    def all_incidents(self) -> list[Incident]:
        """Return incidents and quiet spells, ascending.

        A pause while a trainer or a controller was gone is explained by that.
        """
        known = [span for lane in (TRAINER, CONTROLLER) for span in self._spans_down(lane)]
        spells = [
            Incident(start, step, "quiet", "all", f"no record for {end - start:.1f} s", end)
            for start, end, step in self._candidates
            if end - start > self.quiet_after_s
            and not any(a <= start + 0.1 and end <= b + 0.1 for a, b in known)
        ]
        return sorted([*self.incidents, *spells], key=lambda incident: incident.at_s)

    def _spans_down(self, lane: str) -> list[tuple[float, float]]:
        still = [(lost.at_s, self.end_s) for who, lost in self._lost.items() if who == lane]
        return merged([*self._down[lane], *still])

    def lanes(self) -> list[UptimeLane]:
        """Return controller, trainer, weight sync and engines, in this order."""
        if self._incarnations:
            self._incarnations[-1][1] = self.end_s
        up = [(start, end) for start, end in self._incarnations]
        still = {lane: (since, self.end_s) for lane, since in self._since.items()}

        def lane(name: str) -> UptimeLane:
            spans = up if name == CONTROLLER else self._busy[name]
            spans = [*spans, still[name]] if name in still else spans
            busy = covered_shares(merged(spans), self.end_s, INTERVALS)
            return UptimeLane(name, busy, self._spans_down(name))

        return [lane(name) for name in (CONTROLLER, TRAINER, SYNC, *self.engines)]

    def attribution(self) -> dict[str, dict[str, Floats]]:
        """Return for trainer and engines the share of each interval by category.

        What is missing from 1 was recorded by nobody: no controller was up.
        """
        width = self.end_s / STACK_INTERVALS or 1.0
        engines = max(1, len(self._load))
        return {
            TRAINER: dict(self._shares(self._trainer, [each.value for each in TrainerTime], width)),
            "engines": dict(
                self._shares(self._engines, [each.value for each in GeneratorTime], engines * width)
            ),
        }

    def _shares(
        self, laps: dict[str, list[tuple[float, float, float]]], order: list[str], whole_s: float
    ) -> Iterator[tuple[str, Floats]]:
        for category in order:
            if any(seconds > 0 for _, _, seconds in laps.get(category, ())):
                yield (
                    category,
                    np.clip(spread(laps[category], self.end_s, STACK_INTERVALS) / whole_s, 0, 1),
                )

    def to_facts(self) -> dict[str, Any]:
        """Return everything as plain values and arrays, as the page wants it."""
        return {
            "end_s": self.end_s,
            "quiet_after_s": self.quiet_after_s,
            "lanes": [
                {"name": lane.name, "busy": as_bytes(lane.busy), "down": lane.down}
                for lane in self.lanes()
            ],
            "incidents": [msgspec.structs.asdict(each) for each in self.all_incidents()],
            "incidents_left_out": self.dropped_incidents,
            "attribution": {
                who: [{"name": name, "share": as_bytes(share)} for name, share in shares.items()]
                for who, shares in self.attribution().items()
            },
        }


def as_bytes(shares: Floats) -> Any:  # noqa: ANN401  an array of numpy has a type of its own
    """Return shares as bytes, 255 for all: no chart shows a finer difference."""
    return np.rint(np.clip(np.nan_to_num(shares), 0, 1) * 255).astype(np.uint8)

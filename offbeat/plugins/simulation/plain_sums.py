"""Plain count of what a journal's records add up to, for the auditor.

It keeps every interval of time as a pair, and every step by its version; nothing of it is shared
with the sums that the journal writes.
"""

import math
from collections.abc import Sequence

import msgspec

from offbeat.controller import events
from offbeat.controller.events import AnyEvent

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
    """The count over all parts so far. Times are those of the records, which never go back."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}  # by version; those that stand
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
            # Between two controllers nothing is known to work.
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
        """Return whether a page shows the record by itself: processes, rewinds, engines that return."""
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
        """Count the steps, the time in which one was open, and what was attributed."""
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
        """Count the time from a release to the last engine that serves the version it is of."""
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
    """Return the groups whose place the record changes by name."""
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

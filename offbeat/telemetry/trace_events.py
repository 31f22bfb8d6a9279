"""Spans and marks of a run as events of the Chrome trace format, for Perfetto. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

KEPT: Final = 64
"""Outermost spans that a row remembers; spans that begin before those are not added to it."""

MAX_ROWS: Final = 64
"""Maximum number of rows of one lane."""


class TraceRow:
    """Spans that are disjoint or, if the row ``nests``, nested. Times are in microseconds.

    Perfetto draws a row as a stack and drops a span that crosses another. So an overlapping span
    goes to the next row of its lane.
    """

    def __init__(self, *, nests: bool, gap_us: int = 0) -> None:
        """Create a row.

        Args:
            nests: Whether spans may be nested.
            gap_us: Minimum delay between the start of a span and the start of one after or inside
                it. It matters only if the later one is added first. It is 1 where a viewer keeps
                events of one moment in the order of the file, and 0 where it draws the longer one
                first.
        """
        self._nests, self._gap_us = nests, gap_us
        self._spans = list[tuple[int, int]]()  # the outermost ones, in order of time
        self._forgotten_us = 0  # end of the last one that was discarded

    def take(self, start_us: int, end_us: int) -> bool:
        """Add the span; return False, and change nothing, if it would cross another."""
        spans = self._spans
        if start_us < self._forgotten_us:
            return False
        first = len(spans)
        while first and spans[first - 1][1] > start_us:
            first -= 1
        behind = first  # spans[first:behind] would be inside the new one
        while behind < len(spans) and spans[behind][1] <= end_us:
            behind += 1
        holds, followed = behind > first, behind < len(spans)
        if holds and not (self._nests and spans[first][0] >= start_us + self._gap_us):
            return False
        if followed and spans[behind][0] < end_us + self._gap_us:
            return False
        spans[first:behind] = [(start_us, end_us)]
        if len(spans) > KEPT:
            self._forgotten_us = spans.pop(0)[1]
        return True


class Lane:
    """Rows of one lane; a span goes to the first row that accepts it."""

    def __init__(self, number: int, *, nests: bool, gap_us: int = 0) -> None:
        self.number = number
        self.last_us = 0  # latest end of any span
        self._nests, self._gap_us = nests, gap_us
        self._rows = list[TraceRow]()

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, start_us: int, end_us: int) -> int | None:
        """Add the span to a row and return its index; None if all ``MAX_ROWS`` refuse it."""
        self.last_us = max(self.last_us, end_us)
        for number, row in enumerate(self._rows):
            if row.take(start_us, end_us):
                return number
        if len(self._rows) == MAX_ROWS:
            return None
        row = TraceRow(nests=self._nests, gap_us=self._gap_us)
        row.take(start_us, end_us)
        self._rows.append(row)
        return len(self._rows) - 1


Place = tuple[str, str]
"""A lane: its kind (pump, engine, rank, group) and its name."""

GROUPS: Final = "group"
_PROCESSES: Final = {
    "pump": "pumps",
    "engine": "engines",
    "rank": "trainer ranks",
    GROUPS: "groups",
}
_NUMBERS: Final = {kind: number for number, kind in enumerate(_PROCESSES, start=1)}
_NESTING: Final = ("pump", "rank")  # on an engine, overlapping spans belong to different groups
# Process numbers per incarnation of the controller; 0 is for unknown kinds
_PROCESSES_PER_INCARNATION: Final = 10
_GROUPS_KEPT: Final = 1 << 16
_MAX_LANES: Final = 1 << 15
_OTHERS: Final = "others"

Event = dict[str, Any]


class TraceEvents:
    """Creates the events of one incarnation of a controller.

    A kind is a process, a lane a thread; a lane whose spans overlap gets further threads beside it.
    Groups are asynchronous events whose id is the prompt index: a viewer packs thousands of them
    into a few rows. Whatever the order of the spans, those of one row or id are disjoint or nested,
    and no time is negative.
    """

    def __init__(self, incarnation: int, offset_s: float) -> None:
        """``offset_s`` is added to every time: the trace begins at 0."""
        self._incarnation, self._offset_s = incarnation, offset_s
        self._named = set[tuple[int, int]]()  # process and thread; thread -1 is the process itself
        self._lanes = dict[str, dict[str, Lane]]()
        self._groups = dict[str, Lane]()  # least recently used first
        self._forgotten_us = 0  # end of the last group that was discarded
        self._strays = 0

    def span(
        self, lane: Place, name: str, start_s: float, end_s: float, facts: Mapping[str, Any]
    ) -> Iterator[Event]:
        """Yield the events of a span. One that ends before it starts has no duration.

        Raises:
            ValueError: A time is NaN.
            OverflowError: A time is infinite.
        """
        start_us = self._us(start_s)
        end_us = max(start_us, self._us(end_s))
        kind, lane_name = lane
        if kind == GROUPS:
            yield from self._group_span(lane_name, name, start_us, end_us, facts)
            return
        rows = self._lane(kind, lane_name)
        row = rows.row_of(start_us, end_us)
        yield from self._named_lane(kind, lane_name, rows, row or 0)
        if row is None:
            # Under the name of the lane, so that all these are displayed together.
            facts = {"name": name, **facts}
            yield from self._stray(kind, f"{lane_name} more", start_us, end_us, facts)
            return
        thread = _thread(rows, row)
        yield self._event("X", kind, thread, name, start_us, facts) | {"dur": end_us - start_us}

    def mark(
        self, lane: Place, name: str, at_s: float, facts: Mapping[str, Any]
    ) -> Iterator[Event]:
        """Yield the event of a mark. Raises like ``span``."""
        at_us = self._us(at_s)
        kind, lane_name = lane
        if kind == GROUPS:
            yield from self._named_process(kind)
            yield self._event("n", kind, 0, name, at_us, facts) | _identity(lane_name)
            return
        rows = self._lane(kind, lane_name)
        yield from self._named_lane(kind, lane_name, rows, 0)
        yield self._event("i", kind, _thread(rows, 0), name, at_us, facts) | {"s": "t"}

    # --- lanes -----------------------------------------------------------------------------------

    def _lane(self, kind: str, name: str) -> Lane:
        lanes = self._lanes.setdefault(kind, {})
        if name not in lanes and len(lanes) >= _MAX_LANES:
            name = _OTHERS
        if name not in lanes:
            lanes[name] = Lane(len(lanes), nests=kind in _NESTING)
        return lanes[name]

    def _group_span(
        self, group: str, name: str, start_us: int, end_us: int, facts: Mapping[str, Any]
    ) -> Iterator[Event]:
        yield from self._named_process(GROUPS)
        rows = self._groups.pop(group, None)
        if rows is None and start_us < self._forgotten_us:  # it may belong to a discarded group
            yield from self._stray(GROUPS, name, start_us, end_us, facts)
            return
        rows = rows or Lane(0, nests=True, gap_us=1)
        self._groups[group] = rows
        if len(self._groups) > _GROUPS_KEPT:
            oldest = self._groups.pop(next(iter(self._groups)))
            self._forgotten_us = max(self._forgotten_us, oldest.last_us)
        row = rows.row_of(start_us, end_us)
        if row is None:
            yield from self._stray(GROUPS, name, start_us, end_us, facts)
        else:
            yield from self._pair(GROUPS, name, start_us, end_us, facts, _identity(group, row))

    def _stray(
        self, kind: str, name: str, start_us: int, end_us: int, facts: Mapping[str, Any]
    ) -> Iterator[Event]:
        """Yield a span with an id of its own, which cannot overlap others."""
        self._strays += 1
        identity = {"id": f"{self._incarnation}.{kind}.{self._strays}", "cat": kind}
        yield from self._pair(kind, name, start_us, end_us, facts, identity)

    # --- events ----------------------------------------------------------------------------------

    def _us(self, time_s: float) -> int:
        return max(0, round((time_s + self._offset_s) * 1e6))

    def _process(self, kind: str) -> int:
        return self._incarnation * _PROCESSES_PER_INCARNATION + _NUMBERS.get(kind, 0)

    def _event(
        self, phase: str, kind: str, thread: int, name: str, at_us: int, facts: Mapping[str, Any]
    ) -> Event:
        event: Event = {
            "name": name, "ph": phase, "ts": at_us, "pid": self._process(kind), "tid": thread
        }  # fmt: skip
        if facts:
            event["args"] = facts
        return event

    def _pair(
        self,
        kind: str,
        name: str,
        start_us: int,
        end_us: int,
        facts: Mapping[str, Any],
        identity: Event,
    ) -> Iterator[Event]:
        yield self._event("b", kind, 0, name, start_us, facts) | identity
        yield self._event("e", kind, 0, name, end_us, {}) | identity

    def _named_process(self, kind: str) -> Iterator[Event]:
        process = self._process(kind)
        if (process, -1) in self._named:
            return
        self._named.add((process, -1))
        title = _PROCESSES.get(kind, kind)
        if self._incarnation:
            title = f"{title}, incarnation {self._incarnation + 1}"
        yield self._metadata(process, 0, "process_name", name=title)
        yield self._metadata(process, 0, "process_sort_index", sort_index=process)

    def _named_lane(self, kind: str, name: str, lane: Lane, row: int) -> Iterator[Event]:
        yield from self._named_process(kind)
        process, thread = self._process(kind), _thread(lane, row)
        if (process, thread) in self._named:
            return
        self._named.add((process, thread))
        if lane.number == _MAX_LANES:
            name = _OTHERS
        title = f"{name} +{row}" if row else name
        yield self._metadata(process, thread, "thread_name", name=title)
        yield self._metadata(process, thread, "thread_sort_index", sort_index=thread)

    def _metadata(self, process: int, thread: int, what: str, **facts: str | int) -> Event:
        return {"name": what, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": facts}


def _thread(lane: Lane, row: int) -> int:
    return 1 + lane.number * MAX_ROWS + row


def end_event(left_out: int) -> Event:
    """Return the last event of an incarnation: the number of spans and marks that were left out."""
    facts = {"left_out": left_out}
    return {"name": "offbeat.end", "ph": "M", "ts": 0, "pid": 0, "tid": 0, "args": facts}


def _identity(group: str, row: int = 0) -> Event:
    """Return the id of a group's events: its prompt index; ``412+1`` for overlapping spans."""
    prompt_index = group.removeprefix("g-").lstrip("0") or "0"
    return {"id": f"{prompt_index}+{row}" if row else prompt_index, "cat": GROUPS}

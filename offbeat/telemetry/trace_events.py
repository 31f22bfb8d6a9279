"""Spans and marks of a run as events of the Chrome trace format, for Perfetto. Pure."""

import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Final

Place = tuple[str, str]
"""A lane: its kind (pump, engine, rank, group) and its name."""

Event = dict[str, Any]

GROUPS: Final = "group"
_PROCESSES: Final = {
    "pump": "pumps",
    "engine": "engines",
    "rank": "trainer ranks",
    GROUPS: "groups",
}
_NUMBERS: Final = {kind: number for number, kind in enumerate(_PROCESSES, start=1)}
# Process numbers per incarnation of the controller; 0 is for unknown kinds
_PROCESSES_PER_INCARNATION: Final = 10


class TraceEvents:
    """Creates the events of one incarnation of a controller.

    A kind is a process and a lane is a thread. Perfetto draws a thread as a stack and drops a span
    that crosses another, so an overlapping span goes to another thread of its lane. The observer
    reports spans in the order of their ends: a lane has as many threads as spans overlap.

    Groups are pairs of asynchronous events: a viewer packs thousands of them into a few rows. Their
    ids begin with the prompt index. No time is negative.
    """

    def __init__(self, incarnation: int, offset_s: float) -> None:
        """``offset_s`` is added to every time: the trace begins at 0."""
        self._first_process = incarnation * _PROCESSES_PER_INCARNATION
        self._suffix = f", incarnation {incarnation + 1}" if incarnation else ""
        self._offset_s = offset_s
        self._processes = set[int]()
        self._lanes = dict[Place, dict[int, int]]()  # end of the last span by thread
        self._threads = self._group_spans = 0  # numbers of them so far

    def create(
        self, lane: Place, name: str, start_s: float, end_s: float | None, facts: Mapping[str, Any]
    ) -> Iterator[Event]:
        """Yield the events of a span or, without an end, of a mark on the lane's first thread.

        A span that ends before it starts has no duration.

        Raises:
            ValueError: A time is NaN.
            OverflowError: A time is infinite.
        """
        start_us = self._us(start_s)
        end_us = None if end_s is None else max(start_us, self._us(end_s))
        process = yield from self._process(lane[0])
        if end_us is None:
            thread = yield from self._thread(lane, process, math.inf)
            yield _event("i", name, process, thread, start_us, facts) | {"s": "t"}
        elif lane[0] == GROUPS:
            self._group_spans += 1
            prompt_index = lane[1].removeprefix("g-").lstrip("0") or "0"
            identity = {"id": f"{prompt_index}.{self._group_spans}", "cat": GROUPS}
            yield _event("b", name, process, 0, start_us, facts) | identity
            yield _event("e", name, process, 0, end_us, {}) | identity
        else:
            thread = yield from self._thread(lane, process, start_us)
            self._lanes[lane][thread] = end_us
            yield _event("X", name, process, thread, start_us, facts) | {"dur": end_us - start_us}

    def _us(self, time_s: float) -> int:
        return max(0, round((time_s + self._offset_s) * 1e6))

    def _process(self, kind: str) -> Generator[Event, None, int]:
        """Return the process of a kind; the first time, yield the events that name it."""
        process = self._first_process + _NUMBERS.get(kind, 0)
        if process not in self._processes:
            self._processes.add(process)
            title = _PROCESSES.get(kind, kind) + self._suffix
            yield metadata("process_name", {"name": title}, process)
            yield metadata("process_sort_index", {"sort_index": process}, process)
        return process

    def _thread(self, lane: Place, process: int, start_us: float) -> Generator[Event, None, int]:
        """Return the lane's first thread that is free from this time on; name it if it is new."""
        threads = self._lanes.setdefault(lane, {})
        for thread, free_us in threads.items():
            if free_us <= start_us:
                return thread
        title = f"{lane[1]} +{len(threads)}" if threads else lane[1]
        thread = self._threads = self._threads + 1
        threads[thread] = 0
        yield metadata("thread_name", {"name": title}, process, thread)
        # Threads of one lane share an index, so that they are drawn next to each other.
        yield metadata("thread_sort_index", {"sort_index": next(iter(threads))}, process, thread)
        return thread


def metadata(what: str, facts: Mapping[str, Any], process: int = 0, thread: int = 0) -> Event:
    """Return an event that describes a process, a thread or, by default, the whole trace."""
    return _event("M", what, process, thread, 0, facts)


def _event(
    phase: str, name: str, process: int, thread: int, at_us: int, facts: Mapping[str, Any]
) -> Event:
    event: Event = {"name": name, "ph": phase, "ts": at_us, "pid": process, "tid": thread}
    return event | {"args": facts} if facts else event

"""Writes ``trace.json``, a run's timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.

``TraceEvents`` converts spans and marks to Chrome trace events. ``TraceJson`` is the file with one
line per event. ``TraceFile`` writes the events in a thread.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from offbeat.telemetry.spool import Pause

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

    A kind is a process and a lane is a thread. Perfetto draws a thread as a stack and drops spans
    that cross each other. So a span that overlaps with another one goes to a different thread of
    its lane. The observer reports spans in the order of their ends, so a lane needs only as many
    threads as spans overlap.

    Groups are pairs of asynchronous events, because viewers pack thousands of these into a few
    rows. Their ids begin with the prompt index. No time is negative.
    """

    def __init__(self, incarnation: int, offset_s: float) -> None:
        """Add ``offset_s`` to every time, so that the trace begins at 0."""
        self._first_process = incarnation * _PROCESSES_PER_INCARNATION
        self._suffix = f", incarnation {incarnation + 1}" if incarnation else ""
        self._offset_s = offset_s
        self._processes = set[int]()
        self._lanes = dict[Place, dict[int, int]]()  # end of the last span by thread
        self._threads = self._group_spans = 0  # numbers of them so far

    def create(
        self, lane: Place, name: str, start_s: float, end_s: float | None, facts: Mapping[str, Any]
    ) -> Iterator[Event]:
        """Yield the events of a span. Without an end, it is a mark on the lane's first thread.

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
        """Return the process of a kind. On first use, yield the events that name it."""
        process = self._first_process + _NUMBERS.get(kind, 0)
        if process not in self._processes:
            self._processes.add(process)
            title = _PROCESSES.get(kind, kind) + self._suffix
            yield metadata("process_name", {"name": title}, process)
            yield metadata("process_sort_index", {"sort_index": process}, process)
        return process

    def _thread(self, lane: Place, process: int, start_us: float) -> Generator[Event, None, int]:
        """Return the lane's first thread that is free from this time on. If it is new, name it."""
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


log = structlog.stdlib.get_logger()
_BEGIN: Final = "offbeat.begin"
_MARK: Final = f'"name":"{_BEGIN}"'.encode()


class TraceJson:
    """Appends events. If a write raised, the next write cuts off the partial line that it left.

    The file is ``[``, then one event per line, separated by commas, then ``]``. So it can be read
    at any moment, and continued after a crash.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = 0  # number of events in the file
        self._file: FileIO | None = None
        self._end = 0  # offset of the end of the last whole event

    def open(self, unix_s: float) -> tuple[int, float]:
        """Create the file, or continue after its last complete event.

        A file with different content is renamed to ``trace.json.unreadable``.

        Returns:
            The number of controllers that have written before, and the Unix time of the trace's 0.

        Raises:
            OSError: The file cannot be opened.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        try:
            incarnation, began_unix_s = self._scan()
        except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
            if self.path.stat().st_size:
                aside = self.path.with_name(f"{self.path.name}.unreadable")
                self.path.rename(aside)
                log.warning("trace.set_aside", path=str(aside))
            self._end = self.events = 0
            incarnation, began_unix_s = 0, unix_s
        self._file = FileIO(self.path, "a")
        facts = {"incarnation": incarnation, "unix_s": unix_s, "began_unix_s": began_unix_s}
        self.append([msgspec.json.encode(metadata(_BEGIN, facts))])
        return incarnation, began_unix_s

    def append(self, events: Sequence[bytes]) -> None:
        """Write encoded events. If that fails, a later call removes the part of them that was written.

        Raises:
            OSError: The write failed.
        """
        if events:
            self._write((b"," if self._end else b"[\n") + b"\n,".join(events) + b"\n")
            self.events += len(events)

    def close(self) -> None:
        """End the array.

        Raises:
            OSError: The write failed.
        """
        if self._file is not None:
            self._write(b"]\n")
            self._file.close()
            self._file = None

    def _write(self, content: bytes) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is not open")
        self._file.truncate(self._end)
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        self._end += len(content)

    def _scan(self) -> tuple[int, float]:
        """Return the result of ``open``. Record where the last complete event ends."""
        incarnations, self.events, first = 0, 0, b""
        with self.path.open("rb") as file:
            self._end = len(file.readline())  # the line with [
            for line in file:
                if not line.endswith(b"}\n"):
                    break  # the end of the array, or a torn event
                first = first or line
                incarnations += _MARK in line
                self.events += 1
                self._end += len(line)
        begin: dict[str, Any] = msgspec.json.decode(first, type=dict[str, Any])
        return incarnations, float(begin["args"]["began_unix_s"])


TRACE_FILE: Final = "trace.json"
SPOOLED: Final = 200_000
"""Spans and marks that may wait for the writer, about 80 MB. Any further ones are left out."""

MAX_EVENTS: Final = 2_000_000
"""Maximum number of events in the file, about 300 MB."""

_FLUSH_S: Final = 0.5  # seconds between two writes
_BATCH: Final = 4096  # maximum spans and marks per write

_Spooled = tuple[Place, str, float, float | None, dict[str, str | float]]


class TraceTally(msgspec.Struct, frozen=True):
    """Counts of spans and marks. Each of these is written, left out or pending."""

    written: int
    left_out: int  # the spool or the file was full, or a time or fact was not a number
    pending: int
    failures: int  # number of writes that raised


class TraceFile:
    """Records spans and marks; a thread writes them, twice per second.

    ``span`` and ``mark`` append to a bounded spool: they never wait and never raise. Call them only
    from the controller's thread.

    After ``close`` the file is valid JSON. Before that, and after a crash, the array has no end.
    The format allows this, and Perfetto and Chrome load such a file. Only a torn last event is
    lost. A later controller of the run continues the same file and time axis, under new process
    numbers.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        *,
        spooled: int = SPOOLED,
        max_events: int = MAX_EVENTS,
        unix_s: Callable[[], float] = time.time,
        pause: Pause = threading.Event.wait,
    ) -> None:
        """Create the trace. ``clock`` measures the times of spans and marks, in seconds."""
        self._file = TraceJson(path)
        self._began_s, self._began_unix_s = clock(), unix_s()
        self._spooled, self._max_events, self._pause = spooled, max_events, pause
        self._spool = deque[_Spooled]()
        self._finishing = threading.Event()
        # A thread that hangs on a dead disk must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._events: TraceEvents | None = None
        self._batch = list[bytes]()  # encoded and not written yet
        self._batch_spans = 0
        self._accepted = self._refused = 0  # written by the caller's thread
        self._written = self._left_out = self._failures = 0  # written by the writer's thread
        self._closed = False

    def start(self) -> None:
        """Start the writer. It also writes spans and marks recorded before."""
        self._thread.start()

    def span(
        self, lane: Place, name: str, start_s: float, end_s: float, **facts: str | float
    ) -> None:
        """Record something that lasted from ``start_s`` to ``end_s``."""
        self._put((lane, name, start_s, end_s, facts))

    def mark(self, lane: Place, name: str, at_s: float, **facts: str | float) -> None:
        """Record something that happened at one moment."""
        self._put((lane, name, at_s, None, facts))

    def close(self, deadline_s: float) -> TraceTally:
        """Write all spooled events and end the file; return within the deadline.

        Blocks: call it from a thread, or outside of an event loop. A second call does nothing.
        """
        if not self._closed:
            self._closed = True
            if self._thread.ident is None:
                self.start()
            self._finishing.set()
            self._thread.join(deadline_s)
            tally = self.tally
            if tally.pending or tally.left_out or self._thread.is_alive():
                log.warning("trace.incomplete", **msgspec.to_builtins(tally))
        return self.tally

    @property
    def tally(self) -> TraceTally:
        left_out = self._refused + self._left_out
        pending = self._accepted - self._written - left_out
        return TraceTally(self._written, left_out, pending, self._failures)

    def _put(self, spooled: _Spooled) -> None:
        self._accepted += 1
        if self._closed or len(self._spool) >= self._spooled:
            self._refused += 1
        else:
            self._spool.append(spooled)

    # --- the writer's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            last = self._finishing.is_set()  # everything spooled before is written below
            self._attempt(self._write_spooled)
            if last:
                break
            self._pause(self._finishing, _FLUSH_S)
        self._attempt(self._end)

    def _attempt(self, write: Callable[[], None]) -> None:
        """Try to write. Keep a failed batch for the next attempt."""
        try:
            write()
        except OSError as error:
            self._failures += 1
            if self._failures == 1:
                log.warning("trace.failing", path=str(self._file.path), error=repr(error))

    def _write_spooled(self) -> None:
        events = self._events = self._events or self._opened()
        while self._spool or self._batch:
            if not self._batch_spans:
                self._encode(events)
            self._file.append(self._batch)
            self._written += self._batch_spans
            self._batch, self._batch_spans = [], 0

    def _opened(self) -> TraceEvents:
        """Create the file, or continue the file of an earlier controller."""
        incarnation, began_unix_s = self._file.open(self._began_unix_s)
        return TraceEvents(incarnation, self._began_unix_s - began_unix_s - self._began_s)

    def _encode(self, events: TraceEvents) -> None:
        while self._spool and self._batch_spans < _BATCH:
            lane, name, start_s, end_s, facts = self._spool.popleft()
            if self._file.events + len(self._batch) >= self._max_events:
                self._left_out += 1
                continue
            try:
                for event in events.create(lane, name, start_s, end_s, facts):
                    self._batch.append(msgspec.json.encode(event))
            except (TypeError, ValueError, OverflowError):
                self._left_out += 1
            else:
                self._batch_spans += 1

    def _end(self) -> None:
        if self._events is not None:
            end = metadata("offbeat.end", {"left_out": self.tally.left_out})
            self._file.append([msgspec.json.encode(end)])
            self._file.close()

"""Writes ``trace.json``, a run's timeline for Perfetto (ui.perfetto.dev) or chrome://tracing."""

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from offbeat.telemetry.spool import Pause
from offbeat.telemetry.trace_events import Place, TraceEvents, metadata
from offbeat.telemetry.trace_json import TraceJson

log = structlog.stdlib.get_logger()

TRACE_FILE: Final = "trace.json"
SPOOLED: Final = 200_000
"""Spans and marks that the writer may be behind, some 80 MB, before further ones are left out."""

MAX_EVENTS: Final = 2_000_000
"""Maximum number of events in the file, some 300 MB."""

_FLUSH_S: Final = 0.5  # between two writes
_BATCH: Final = 4096  # spans and marks of one write

_Spooled = tuple[Place, str, float, float | None, dict[str, str | float]]


class TraceTally(msgspec.Struct, frozen=True):
    """Counts of spans and marks: accepted = written + left out + pending."""

    accepted: int
    written: int
    left_out: int  # the spool or the file was full, or a time or fact was not a number
    pending: int
    failures: int  # number of writes that raised


class TraceFile:
    """Records spans and marks; a thread writes them, twice per second.

    ``span`` and ``mark`` append to a bounded spool: they never wait and never raise. They belong to
    one thread, the controller's.

    After ``close`` the file is valid JSON. Before, and after a crash, it is the same array without
    its end: the format allows that, and Perfetto and Chrome load it. Only a torn last event is
    lost. A later controller of the run continues the same file, under processes of its own and on
    the same time axis.
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
        """``clock`` is that of the times of spans and marks, in seconds."""
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
        """Start the writer. Spans and marks recorded before are written now."""
        self._thread.start()

    def span(
        self, lane: Place, name: str, start_s: float, end_s: float, **facts: str | float
    ) -> None:
        """Record something that took from ``start_s`` to ``end_s``."""
        self._put((lane, name, start_s, end_s, facts))

    def mark(self, lane: Place, name: str, at_s: float, **facts: str | float) -> None:
        """Record something that happened at one moment."""
        self._put((lane, name, at_s, None, facts))

    def close(self, deadline_s: float) -> TraceTally:
        """Write what is spooled and end the file; returns within the deadline.

        Blocks: call it from a thread, or where no event loop runs. A second call does nothing.
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
        return TraceTally(self._accepted, self._written, left_out, pending, self._failures)

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
        """Try to write; keep what failed for the next attempt."""
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
        """Create the file, or continue that of an earlier controller."""
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

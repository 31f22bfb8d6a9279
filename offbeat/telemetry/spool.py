"""Spools a sink's records and writes them in a thread, so that ``put`` returns at once."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final, ParamSpec

import msgspec
import structlog

from offbeat.telemetry.records import MetricRecord
from offbeat.telemetry.tracker import Sink, SinkUnusable

log = structlog.stdlib.get_logger()

Pause = Callable[[threading.Event, float], object]
"""Waits for this many seconds, or until the event is set."""

P = ParamSpec("P")
_FIRST_PAUSE_S: Final = 0.5  # after a sink's first failed write
_LONGEST_PAUSE_S: Final = 30.0  # after many failed writes


class SinkCounts(msgspec.Struct, frozen=True):
    """Counts of one sink's records. Each record is written, dropped or pending."""

    sink: str
    written: int
    dropped: int  # the oldest records if the spool was full; all records if the sink is unusable
    pending: int
    failures: int  # number of calls that raised


class SinkWriter:
    """Writes records from a bounded spool to one sink, in order, and retries if the sink raises.

    Only the producer's thread calls ``put`` and ``finish``. Only the writer's thread calls the
    sink. No lock is needed: the queue's put never waits, and every counter has one writer.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        capacity: int,
        pause: Pause = threading.Event.wait,
    ) -> None:
        self._sink, self._capacity, self._pause = sink, capacity, pause
        self._queue = queue.SimpleQueue[MetricRecord | None]()
        self._finishing = threading.Event()
        # A thread that hangs in a sink must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._accepted = self._overflowed = self._written = self._failures = 0
        self._unusable = False

    def start(self) -> None:
        self._thread.start()

    def put(self, record: MetricRecord) -> None:
        """Add a record. Never waits, never raises. A full spool loses its oldest record."""
        self._accepted += 1
        if self._unusable:
            return
        if self._queue.qsize() >= self._capacity:
            with contextlib.suppress(queue.Empty):  # the writer was faster: there is room now
                self._queue.get_nowait()
                self._overflowed += 1
        self._queue.put(record)

    def finish(self) -> None:
        """Accept no more records.

        The writer still writes spooled records, but does not retry after a failure.
        """
        if self._thread.ident is None:  # closed before it was started: write the spooled records
            self.start()
        self._finishing.set()
        self._queue.put(None)  # marks the end, after the last record

    def join(self, timeout_s: float) -> bool:
        """Wait for the sink to be closed; return False on a timeout."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def tally(self) -> SinkCounts:
        pending = self._accepted - self._written - self._overflowed
        dropped, pending = (
            (self._overflowed + pending, 0) if self._unusable else (self._overflowed, pending)
        )
        return SinkCounts(self._sink.name, self._written, dropped, pending, self._failures)

    def _run(self) -> None:
        try:
            self._feed()
        except SinkUnusable as error:
            self._unusable = True
            self._forget()
            log.warning("sink.unusable", sink=self._sink.name, detail=str(error))
        finally:
            self._close()

    def _forget(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

    def _feed(self) -> None:
        if not self._persist(self._sink.open):
            return
        while (record := self._queue.get()) is not None:
            if not self._persist(self._sink.write, record):
                return
            self._written += 1

    def _persist(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Repeat the call until it succeeds. Return False if it fails after the run has ended."""
        failures_before, pause_s = self._failures, _FIRST_PAUSE_S
        while True:
            try:
                call(*args, **kwargs)
            except SinkUnusable:
                raise
            except Exception as error:  # noqa: BLE001  whatever a sink raises is survived, counted, logged
                self._failures += 1
                if self._failures == failures_before + 1:
                    log.warning("sink.failing", sink=self._sink.name, error=repr(error))
                if self._finishing.is_set():
                    return False
                self._pause(self._finishing, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                break
        if self._failures > failures_before:
            log.info("sink.recovered", sink=self._sink.name, spooled=self._queue.qsize())
        return True

    def _close(self) -> None:
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001  the run is over: all that is left is to say so
            self._failures += 1
            log.warning("sink.close_failed", sink=self._sink.name, error=repr(error))

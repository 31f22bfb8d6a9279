"""Clocks of the CPU seconds of threads that share a process."""

import contextlib
import threading
import time
from collections.abc import Callable


class CpuClocks:
    """CPU seconds of the threads that report their own time; the rest is the controller's."""

    def __init__(self, process_s: Callable[[], float] = time.process_time) -> None:
        """``process_s`` returns the CPU seconds of the whole process."""
        self._process_s = process_s
        self._threads = list[Callable[[], float]]()
        self._lock = threading.Lock()

    def clock_of(self, thread: threading.Thread) -> Callable[[], float]:
        """Return a clock of a running thread's CPU seconds, which may be read in any thread.

        It stands still once the thread has ended.
        """
        identity = thread.ident
        if identity is None:
            raise RuntimeError(f"thread {thread.name} has not started")
        if not hasattr(time, "pthread_getcpuclockid"):  # macOS: its time counts as the controller's
            return lambda: 0.0
        clock_id, last_s = time.pthread_getcpuclockid(identity), 0.0

        def read() -> float:
            nonlocal last_s
            with contextlib.suppress(OSError):  # the thread has ended
                last_s = time.clock_gettime(clock_id)
            return last_s

        with self._lock:
            self._threads.append(read)
        return read

    def rest_s(self) -> float:
        """Return the CPU seconds of the process without those of the threads that have a clock."""
        with self._lock:
            hosted_s = sum(read() for read in self._threads)
        return self._process_s() - hosted_s

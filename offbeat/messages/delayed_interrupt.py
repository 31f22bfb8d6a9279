"""Delays Ctrl-C while torch is imported."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delay_interrupt() -> Generator[None]:
    """Delay Ctrl-C to the end of the block in the main thread; a second one is not delayed.

    A process whose import of torch was interrupted cannot import it again. Python handles signals
    in the main thread only, so in another thread nothing is delayed.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    has_arrived = threading.Event()

    def hold(number: int, frame: FrameType | None) -> None:
        if has_arrived.is_set() and callable(before):
            before(number, frame)
        has_arrived.set()

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if has_arrived.is_set():
            signal.raise_signal(signal.SIGINT)

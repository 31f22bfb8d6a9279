"""Delays Ctrl-C while torch is imported."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def delay_interrupt() -> Generator[None]:
    """Delay Ctrl-C in the main thread to the end of the block. A second Ctrl-C is not delayed.

    If an import of torch is interrupted, the process cannot import torch again. Python handles
    signals only in the main thread, so in any other thread nothing needs to be delayed.
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

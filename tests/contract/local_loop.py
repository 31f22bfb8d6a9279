"""The loop of the rollouts of a local run, for the length of a story."""

from collections.abc import Generator
from contextlib import contextmanager

from offbeat.local.threads import LoopThread


@contextmanager
def rollouts_loop() -> Generator[LoopThread]:
    loop = LoopThread("rollouts")
    try:
        yield loop
    finally:
        loop.stop()

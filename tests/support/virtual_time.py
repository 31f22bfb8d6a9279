"""An event loop whose clock jumps to the next timer: tests wait for nothing."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("deadlock: no task can run and no timer is set")
        self.now += 0 if events else timeout or 0
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` is virtual; sleeping costs nothing."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[object, object, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

"""An event loop whose clock jumps to the next timer: tests wait for nothing."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

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


class InlineLoop(VirtualLoop):
    """Runs at once what would block in a thread: a clock that jumps cannot wait for threads."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        future.set_result(func(*args))
        return future


def run(main: Coroutine[object, object, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

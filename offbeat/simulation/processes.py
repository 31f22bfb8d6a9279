"""Models the operating-system processes of a cluster: killed like SIGKILL, frozen like SIGSTOP.

A process is a context: whatever is started inside inherits it, and the loop asks each callback whose
it is before it runs.
"""

from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, final

import msgspec


@final
class Process:
    """One incarnation of a process.

    Killed, none of its callbacks ever runs again: no ``finally``, no cancel. Frozen, they wait.
    """

    __slots__ = ("alive", "context", "died_at", "frozen", "name", "parked", "starting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.frozen = True, False
        self.died_at = 0.0
        self.parked: list[Entry | Process] = []  # came due while it was frozen
        self.starting: deque[Entry] = deque()  # first steps of its tasks, in order
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return self.name


class Entry(msgspec.Struct, eq=False):
    """A callback to be run in a process, soon or at ``when_s``: what ``asyncio`` calls a handle."""

    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    context: Context
    process: Process
    when_s: float

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.when_s


PROCESS: Final[ContextVar[Process]] = ContextVar("process")
OUTSIDE: Final = Process("outside")
"""Context of the episode's own machinery, which belongs to no process. It is never killed."""

"""Simulated operating-system processes: killed like SIGKILL, frozen like SIGSTOP.

A process is a context variable that everything started inside it inherits. The loop checks the
process of each callback before it runs.
"""

from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, final

import msgspec


class Entry(msgspec.Struct, eq=False):
    """Callback to run in a process, soon or at ``when_s``: a handle in ``asyncio`` terms."""

    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    context: Context
    process: "Process"
    when_s: float

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.when_s


@final
class Process(msgspec.Struct, eq=False):
    """One incarnation of a process.

    After a kill, none of its callbacks ever runs again: no ``finally``, no cancellation. While it
    is frozen, they wait.
    """

    name: str
    alive: bool = True
    frozen: bool = False
    noticed_at: float = 0.0  # when its callers learn of its death
    parked: "list[Entry | Process]" = []  # callbacks that came due while it was frozen
    # First steps of its tasks, in order
    starting: deque[Entry] = msgspec.field(default_factory=deque[Entry])
    context: Context = msgspec.field(default_factory=copy_context)

    def __post_init__(self) -> None:
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return self.name


PROCESS: Final[ContextVar[Process]] = ContextVar("process")
OUTSIDE: Final = Process("outside")
"""Process of the simulator's own callbacks, which is never killed."""

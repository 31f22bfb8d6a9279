"""Operating-system processes of a simulated cluster: killed like SIGKILL, frozen like SIGSTOP.

A process is a context: whatever is started inside inherits it, and the loop asks each callback whose
it is before it runs.
"""

from collections import deque
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:  # the two modules describe one thing; only the loop needs the other one to run
    from offbeat.simulation.loop import Entry
    from offbeat.simulation.network import Call


@final
class Process:
    """One life of one process.

    Killed, none of its callbacks ever runs again: no ``finally``, no cancel. Frozen, they wait.
    """

    __slots__ = ("alive", "calls", "context", "died_at", "frozen", "name", "parked", "starting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.frozen = True, False
        self.died_at = 0.0
        self.parked: list[Entry | Process] = []  # came due while it was frozen
        self.starting: deque[Entry] = deque()  # first steps of its tasks, in order
        self.calls: dict[Call, None] = {}  # it was asked and has not answered
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return self.name


PROCESS: Final[ContextVar[Process]] = ContextVar("process")
OUTSIDE: Final = Process("outside")
"""What is in no process: the machinery of the episode itself. It is never killed."""

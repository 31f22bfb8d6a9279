"""A queue under test, as the process of one client sees it, and the ways to reach each of them.

Every side is timed by the same loops (``queue_client.py``) over the same arrays. What a side needs its
payload to be (a TensorDict, numpy) is made by ``prepare``, outside the clock.
"""

import importlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast

from benchmarks.queue_figures import OURS, PEER, REFS
from benchmarks.queue_payloads import Columns

T = TypeVar("T")
Prepared = Any
"""A call's worth of groups, in the form the side takes best."""

Handle = Any
"""Information by which a client finds its queue; crosses processes."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows a consumer got.

    Columns over the rows of all groups or of each, and the way to let go.
    """

    columns: Sequence[Mapping[str, Any]]
    token: object


class Side(Protocol):
    """One client. A call returns when it is done: a put is acknowledged, a take has its rows."""

    def prepare(self, groups: Sequence[Columns]) -> Prepared:
        """Prepare the argument of ``put``."""
        ...

    def declare(self, partition: str, columns: Columns) -> None:
        """Declare, before the first put, that the partition holds groups with columns like these."""
        ...

    def put(self, partition: str, payload: Prepared) -> None: ...

    def take(self, partition: str, groups: int, names: Sequence[str]) -> Taken:
        """Wait for as many groups, and read their columns."""
        ...

    def done(self, partition: str, taken: Taken) -> None:
        """Report that these rows are no longer needed: their memory is to be free."""
        ...

    def clear(self, partition: str) -> None:
        """Let go of everything in the partition."""
        ...

    def bytes_in_use(self) -> int | None:
        """Return the payload memory that is neither free nor kept for later.

        None where it is not counted.
        """
        ...

    def run(self, work: Awaitable[T]) -> T:
        """Run ``work`` on the loop that owns the client's ``a`` methods."""
        ...

    async def aput(self, partition: str, payload: Prepared) -> None: ...
    async def atake(self, partition: str, groups: int, names: Sequence[str]) -> Taken: ...
    async def adone(self, partition: str, taken: Taken) -> None: ...


class Entry(Protocol):
    """The module of a side."""

    def start(self) -> Handle:
        """Set the queue up, once, from the driver. What ``connect`` needs."""
        ...

    def connect(self, handle: Handle) -> Side:
        """A client, in the process that calls."""
        ...

    def stop(self, handle: Handle) -> None: ...


_MODULES: Final = {
    OURS: "benchmarks.queue_side_offbeat",
    PEER: "benchmarks.queue_side_peer",
    REFS: "benchmarks.queue_side_refs",
}
SIDES: Final = tuple(_MODULES)


def entry(side: str) -> Entry:
    """The module of a side; only then are its libraries imported."""
    return cast("Entry", importlib.import_module(_MODULES[side]))

"""Process groups of one sender, at rank 0, and one receiver.

Creating a gloo group costs a few milliseconds, so none is kept: a connection that broke in one
transfer does not affect the next. A rank that drops its group closes its connections, which its
peer detects at once, not at a deadline.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch exports these names without declaring it, declares less than it exports, and not all types.

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, Work
from torch.distributed.distributed_c10d import ProcessGroupGloo

from offbeat.plugins.reshard.messages import Route
from offbeat.weight_sync.chunks import BucketMemory
from offbeat.weight_sync.rendezvous.frames import StoreAddress
from offbeat.weight_sync.rendezvous.store import SharedStore

PAIR: Final = 2
"""Size of every group: one sender and one receiver."""


class BrokenLink(Exception):
    """A peer of this connection has ended or is too slow. Not visible outside the transport."""


class GroupAddress(NamedTuple):
    """Location in the store at which sender and receiver exchange their addresses."""

    store: Store
    rank: int
    client: SharedStore  # kept alive: ``store`` holds its C++ half only


def meet(route: Route, session: str, rank: int) -> GroupAddress:
    """Return a rank's location in a session.

    Args:
        route: Address of the sender.
        session: Name of the transfer.
        rank: This rank; the sender is 0.

    Raises:
        BrokenLink: The sender has ended.
    """
    address = StoreAddress(route.host, route.store_port, route.key)
    try:
        client = SharedStore(address, route.timeouts.slack_s)
    except RuntimeError as error:
        raise BrokenLink(_said(error)) from error
    return GroupAddress(PrefixStore(session, client), rank, client)


class PendingMessage(NamedTuple):
    """A message on its way, whose memory stays as it is until it has arrived or failed."""

    work: Work
    data: BucketMemory


class GroupMaker(Protocol):
    """Creates the process groups of a library, all of whose groups have the same calls."""

    def group(self, place: GroupAddress) -> Any:  # noqa: ANN401 -- a backend of torch
        """Return a group of these ranks; raise RuntimeError if not all of them connect."""
        ...

    def close(self, group: Any) -> None:  # noqa: ANN401 -- as above
        """End a group in which nothing is left to do, before its last reference is dropped."""
        ...

    def abort(self, group: Any) -> None:  # noqa: ANN401 -- as above
        """End a group whatever it does, before its last reference is dropped."""
        ...

    def byte(self) -> Tensor:
        """Return one byte of memory that these groups can carry."""
        ...


class PairGroup:
    """Process group of one sender, at rank 0, and one receiver, with messages in flight."""

    def __init__(self, place: GroupAddress, groups: GroupMaker) -> None:
        self._groups, self._rank, self._other = groups, place.rank, 1 - place.rank
        self._group = groups.group(place)
        self._pending, self._begun = deque[PendingMessage](), 0

    @property
    def in_flight(self) -> int:
        """Number of messages that nobody has waited for."""
        return len(self._pending)

    def send(self, data: BucketMemory, tag: int) -> None:
        """Begin to send a message. Its arrival is not acknowledged.

        Raises:
            BrokenLink: The other rank has closed its connection.
        """
        self._begin(self._group.send, data, tag)

    def receive(self, into: BucketMemory, tag: int) -> None:
        """Begin to receive the message of this tag and size.

        Raises:
            BrokenLink: As ``send``.
        """
        self._begin(self._group.recv, into, tag)

    def wait(self, timeout_s: float) -> BucketMemory:
        """Return the oldest message's bytes once it is sent, or received.

        Raises:
            BrokenLink: It failed or timed out; so will every later message of this pair.
        """
        message = self._pending.popleft()
        try:
            message.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise BrokenLink(_said(error)) from error
        return message.data

    def finish(self, timeout_s: float) -> None:
        """Wait until the receiver says that it has everything: what is sent may not have arrived.

        Raises:
            BrokenLink: As ``wait``.
        """
        if self._rank == 0:
            self.receive(self._groups.byte(), self._begun)
        else:
            self.send(self._groups.byte(), self._begun)
        while self._pending:
            self.wait(timeout_s)

    def close(self) -> None:
        """Close the connection by dropping the last references to the group; messages have some."""
        self._groups.close(self._group)
        self._drop()

    def abort(self) -> None:
        """Close the connection whatever is on its way."""
        self._groups.abort(self._group)
        self._drop()

    def _drop(self) -> None:
        self._pending.clear()
        del self._group

    def _begin(
        self, call: Callable[[list[Tensor], int, int], Work], data: BucketMemory, tag: int
    ) -> None:
        tensor = data if isinstance(data, Tensor) else torch.from_numpy(data)
        try:
            work = call([tensor], self._other, tag)
        except RuntimeError as error:
            raise BrokenLink(_said(error)) from error
        self._pending.append(PendingMessage(work, data))
        self._begun += 1


class Device:
    """Local address at which a process meets its peers, and the timeout of connecting to them.

    Reused for many groups: stopping its thread takes longer than sending a small model.
    """

    def __init__(self, host: str, connect_s: float) -> None:
        self.host, self._timeout = host, timedelta(seconds=connect_s)
        self._device = ProcessGroupGloo.create_device(hostname=host)

    def group(self, place: GroupAddress) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # noqa: SLF001 -- there is no public name
        options._devices = [self._device]  # noqa: SLF001
        options._timeout = self._timeout  # noqa: SLF001
        options._threads = 1  # noqa: SLF001 -- one message at a time
        return ProcessGroupGloo(place.store, place.rank, PAIR, options)

    def close(self, group: ProcessGroupGloo) -> None:
        """Do nothing: gloo closes its connections with the last reference."""

    def abort(self, group: ProcessGroupGloo) -> None:
        """Do nothing, as ``close``."""

    def byte(self) -> Tensor:
        return torch.ones(1, dtype=torch.uint8)


class PeerConnection(Protocol):
    """A connection to peers, who detect that it was closed."""

    def close(self) -> None:
        """Close it after all that was begun has ended."""
        ...

    def abort(self) -> None:
        """Close it at once."""
        ...


C = TypeVar("C", bound=PeerConnection)


@contextmanager
def opened(connect: Callable[[], C]) -> Generator[C]:
    """Enter a connection for the duration of a block.

    If the block raises, it is aborted first, so that the peers notice. Otherwise it is closed in the
    background; gloo needs some ten milliseconds per connection.

    Raises:
        BrokenLink: Not every rank connected.
    """
    try:
        connection = connect()
    except RuntimeError as error:
        raise BrokenLink(_said(error)) from error
    try:
        yield connection
    except BaseException:
        connection.abort()
        raise
    # Not a daemon thread, though its creator may be: one that Python ends inside gloo aborts the
    # process.
    threading.Thread(target=connection.close, name="close-group", daemon=False).start()


def _said(error: Exception) -> str:
    return str(error).splitlines()[0].rpartition("] ")[2] or type(error).__name__

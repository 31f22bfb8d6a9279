"""Process groups of one sender, at rank 0, and one receiver.

Creating a gloo group costs only a few milliseconds, so groups are not kept. A broken connection of
one transfer does not affect the next. A rank that drops its group closes its connections. Its peer
detects this immediately, not at a deadline.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch exports these names without declarations, and declares only some types.

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
    """Connection with a peer that has ended or is too slow. Not visible outside the transport."""


class GroupAddress(NamedTuple):
    """Place in the store where sender and receiver exchange their addresses."""

    store: Store
    rank: int
    client: SharedStore  # kept alive here, because ``store`` holds only its C++ half


def meet(route: Route, session: str, rank: int) -> GroupAddress:
    """Return a rank's place in a session.

    Args:
        route: Address of the sender.
        session: Name of the transfer.
        rank: This rank. The sender is rank 0.

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
    """Message in flight. Its memory must not change until it has arrived or failed."""

    work: Work
    data: BucketMemory


class GroupMaker(Protocol):
    """Creates process groups of a library. All its groups have the same calls."""

    def group(self, place: GroupAddress) -> Any:  # noqa: ANN401 -- a backend of torch
        """Return a group of these ranks. Raise RuntimeError if not all of them connect."""
        ...

    def close(self, group: Any) -> None:  # noqa: ANN401 -- as above
        """End an idle group before its last reference is dropped."""
        ...

    def abort(self, group: Any) -> None:  # noqa: ANN401 -- as above
        """End a group, even a busy one, before its last reference is dropped."""
        ...

    def byte(self) -> Tensor:
        """Return one byte of memory that these groups can send."""
        ...


class PairGroup:
    """Process group of one sender, at rank 0, and one receiver, with messages in flight."""

    def __init__(self, place: GroupAddress, groups: GroupMaker) -> None:
        self._groups, self._rank, self._other = groups, place.rank, 1 - place.rank
        self._group = groups.group(place)
        self._pending, self._begun = deque[PendingMessage](), 0

    @property
    def in_flight(self) -> int:
        """Number of messages without a completed ``wait``."""
        return len(self._pending)

    def send(self, data: BucketMemory, tag: int) -> None:
        """Start sending a message. Its arrival is not acknowledged.

        Raises:
            BrokenLink: The other rank has closed its connection.
        """
        self._begin(self._group.send, data, tag)

    def receive(self, into: BucketMemory, tag: int) -> None:
        """Start receiving the message of this tag and size.

        Raises:
            BrokenLink: As ``send``.
        """
        self._begin(self._group.recv, into, tag)

    def wait(self, timeout_s: float) -> BucketMemory:
        """Wait until the oldest message is sent or received, and return its bytes.

        Raises:
            BrokenLink: It failed or timed out. Every later message of this pair fails too.
        """
        message = self._pending.popleft()
        try:
            message.work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise BrokenLink(_said(error)) from error
        return message.data

    def finish(self, timeout_s: float) -> None:
        """Wait for the receiver's confirmation, because sent messages may not have arrived.

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
        """Close the connection by dropping all references to the group, including the messages."""
        self._groups.close(self._group)
        self._drop()

    def abort(self) -> None:
        """Close the connection even if messages are in flight."""
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
    """Local address for connections to peers, with the timeout of connecting.

    Reused for many groups, because stopping its thread is slower than sending a small model.
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
        """Do nothing, because gloo closes its connections with the last reference."""

    def abort(self, group: ProcessGroupGloo) -> None:
        """Do nothing, like ``close``."""

    def byte(self) -> Tensor:
        return torch.ones(1, dtype=torch.uint8)


class PeerConnection(Protocol):
    """Connection to peers. The peers detect that it was closed."""

    def close(self) -> None:
        """Close it after all started messages have ended."""
        ...

    def abort(self) -> None:
        """Close it at once."""
        ...


C = TypeVar("C", bound=PeerConnection)


@contextmanager
def open_connection(connect: Callable[[], C]) -> Generator[C]:
    """Enter a connection for the duration of a block.

    If the block raises, the connection is aborted first, so that the peers detect it. Otherwise it
    is closed in the background, because gloo needs some ten milliseconds per connection.

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
    # Not a daemon thread, even if its creator is: if Python ends a daemon thread inside gloo, the
    # process aborts.
    threading.Thread(target=connection.close, name="close-group", daemon=False).start()


def _said(error: Exception) -> str:
    return str(error).splitlines()[0].rpartition("] ")[2] or type(error).__name__

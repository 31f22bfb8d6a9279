"""Wire whose buckets stay where they are: handles of their memory travel, and receipts come back.

    sender                                     receiver
    leaves port and token in the store
    accepts whoever has the token         <--  token, digest of the plan
    packs a bucket, hands out its handle  -->  opens it, copies it into memory of its own
    may pack into that memory again       <--  receipt

A sender that gives up on a receiver may pack into memory that is still being copied. What is copied
then has another digest, and reaches no parameter.
"""

import socket
import threading
import weakref
from collections import defaultdict, deque
from itertools import chain
from typing import Final, Protocol

import msgspec
from torch import Tensor

from offbeat.weight_sync.chunks import BucketMemory
from offbeat.weight_sync.rendezvous.frames import ForeignFrame, FrameReader, SharedKey
from offbeat.weight_sync.transports.group import BrokenLink, GroupAddress
from offbeat.weight_sync.transports.messages import DevicePlace, Route
from offbeat.weight_sync.transports.peer_proof import PeerProof, accept_peer
from offbeat.weight_sync.transports.wire import BucketLink

_KEY: Final = "handles"  # of the sender's port and token in the store


class HandleUnusable(Exception):
    """The memory of a handle cannot be opened: its process may have ended."""


class SharableMemory(Protocol):
    """Memory of one device that other processes can open."""

    @property
    def place(self) -> DevicePlace:
        """Return the device."""
        ...

    def sees(self, device: str) -> bool:
        """Return whether memory of the device with this UUID can be opened here."""
        ...

    def allocate(self, nbytes: int) -> Tensor:
        """Return uninitialised memory [nbytes] uint8."""
        ...

    def handle(self, tensor: Tensor) -> bytes:
        """Return a handle of memory that ``allocate`` has returned; it is valid as long as that."""
        ...

    def copy(self, handle: bytes, into: Tensor) -> None:
        """Copy what another process has handed out. The copy is complete on return.

        Raises:
            HandleUnusable: The memory cannot be opened.
        """
        ...


class HandleWire:
    """Wire between processes of one machine that see the same devices."""

    def __init__(self, name: str, memory: SharableMemory) -> None:
        self.name, self._memory, self._pool = name, memory, _SharedPool(memory)

    @property
    def place(self) -> DevicePlace:
        return self._memory.place

    def refusal(self, route: Route) -> str:
        here, there = self.place, route.place
        if there is None or there.machine != here.machine:
            where = "main memory" if there is None else f"machine {there.machine}"
            return (
                f"sync.wire={self.name} works within a machine; the sender is on {where}, this process on "
                f"{here.machine}. Set sync.wire to nccl or tcp"
            )
        if not self._memory.sees(there.device):
            return (
                f"sync.wire={self.name} opens memory of {there.device}, which this process on "
                f"{here.device} does not see. Set sync.wire to nccl or tcp"
            )
        return ""

    def memory_to_send(self, nbytes: int) -> Tensor:
        return self._pool.lend(nbytes)

    def memory_to_receive(self, nbytes: int) -> Tensor:
        return self._memory.allocate(nbytes)

    def release_memory(self) -> None:
        self._pool.release()

    def link(self, place: GroupAddress, route: Route, address: str) -> BucketLink:
        return HandleLink(place, route, address, self._memory, self._pool)


class _SharedPool:
    """Memory that has been shared, kept until the plan changes: others may refer to it at any time.

    A piece is lent again when its tensor is not referenced any more; a handle is made of it once.
    """

    def __init__(self, memory: SharableMemory) -> None:
        self._memory = memory
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._handles = dict[int, bytes]()  # by address
        self._plan = 0  # how often the plan has changed
        self._lock = threading.RLock()  # memory may return while this very thread has the lock

    def lend(self, nbytes: int) -> Tensor:
        with self._lock:
            free = self._free[nbytes]
            owner = free.pop() if free else self._memory.allocate(nbytes)
            lent = owner.view(-1)  # another object of the same memory
            weakref.finalize(lent, self._returned, owner, self._plan).atexit = False
        return lent

    def handle(self, lent: Tensor) -> bytes:
        address = lent.data_ptr()
        with self._lock:
            if address not in self._handles:
                self._handles[address] = self._memory.handle(lent)
            return self._handles[address]

    def release(self) -> None:
        """Free what is not lent, and what is lent as soon as it returns."""
        with self._lock:
            self._plan += 1
            for owner in chain.from_iterable(self._free.values()):
                self._forget(owner)
            self._free.clear()

    def _returned(self, owner: Tensor, plan: int) -> None:
        with self._lock:
            if plan == self._plan:
                self._free[owner.nbytes].append(owner)
            else:
                self._forget(owner)

    def _forget(self, owner: Tensor) -> None:
        """Forget the handle before the memory is free: the next memory may have this address."""
        self._handles.pop(owner.data_ptr(), None)


class BucketHandle(msgspec.Struct, frozen=True, tag=True):
    """A bucket that is ready to be copied."""

    number: int
    nbytes: int
    handle: bytes


class CopyReceipt(msgspec.Struct, frozen=True, tag=True):
    """Notice that a bucket has been copied."""

    number: int


_decode: Final = msgspec.msgpack.Decoder[BucketHandle | CopyReceipt](
    BucketHandle | CopyReceipt
).decode


class HandleLink:
    """One end of a connection over which handles and receipts travel."""

    def __init__(
        self,
        place: GroupAddress,
        route: Route,
        address: str,
        memory: SharableMemory,
        pool: _SharedPool,
    ) -> None:
        self._memory, self._pool = memory, pool
        self._key, self._frames = route.key, FrameReader(route.key)
        self._pending = deque[tuple[int, Tensor]]()
        limit_s = route.timeouts.slack_s
        try:
            if place.rank == 0:
                self._socket = _accepted(place, address, route.key, limit_s)
            else:
                self._socket = _connected(place, route, limit_s)
        except OSError as error:
            raise BrokenLink(f"no connection for handles: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._is_sender = place.rank == 0

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def send(self, data: BucketMemory, tag: int) -> None:
        lent = _on_device(data)
        self._post(BucketHandle(tag, lent.nbytes, self._pool.handle(lent)))
        self._pending.append((tag, lent))

    def receive(self, into: BucketMemory, tag: int) -> None:
        self._pending.append((tag, _on_device(into)))  # nothing to ask for: handles are handed out

    def wait(self, timeout_s: float) -> BucketMemory:
        message = self._next(timeout_s)
        tag, tensor = self._pending[0]
        if self._is_sender:
            if message != CopyReceipt(tag):
                raise BrokenLink(f"{message} is no receipt of message {tag}")
        else:
            self._copy(message, tag, tensor)
            self._post(CopyReceipt(tag))
        self._pending.popleft()
        return tensor

    def finish(self, timeout_s: float) -> None:
        while self._pending:
            self.wait(timeout_s)

    def close(self) -> None:
        self._pending.clear()
        self._socket.close()

    def abort(self) -> None:
        self.close()

    def _copy(self, message: BucketHandle | CopyReceipt, tag: int, into: Tensor) -> None:
        want = tag, into.nbytes
        if not isinstance(message, BucketHandle) or (message.number, message.nbytes) != want:
            raise BrokenLink(f"{message} is not the handle of message {tag}")
        try:
            self._memory.copy(message.handle, into)
        except HandleUnusable as unusable:
            raise BrokenLink(str(unusable)) from unusable

    def _post(self, message: BucketHandle | CopyReceipt) -> None:
        try:
            self._socket.sendall(self._key.frame(msgspec.msgpack.encode(message)))
        except OSError as error:
            raise BrokenLink(f"the other end has closed: {error}") from error

    def _next(self, timeout_s: float) -> BucketHandle | CopyReceipt:
        self._socket.settimeout(timeout_s)
        try:
            while (body := self._frames.next()) is None:
                data = self._socket.recv(1 << 16)
                if not data:
                    raise BrokenLink("the other end has closed")
                self._frames.feed(data)
            return _decode(body)
        except TimeoutError as error:
            raise BrokenLink(f"the other end has not answered for {timeout_s:.3g} s") from error
        except (OSError, ForeignFrame, msgspec.MsgspecError) as error:
            raise BrokenLink(f"the other end has closed: {error}") from error


class _RendezvousInfo(msgspec.Struct, frozen=True):
    """Port of the sender and token of a link, which its peer reads from the store."""

    port: int
    token: bytes


def _accepted(place: GroupAddress, address: str, key: SharedKey, limit_s: float) -> socket.socket:
    """Listen at a free port, leave it in the store with a token, and accept who has both."""
    expected = PeerProof.fresh(place.plan_digest)
    with socket.create_server((address, 0)) as listening:
        info = _RendezvousInfo(listening.getsockname()[1], expected.token)
        place.store.set(_KEY, msgspec.json.encode(info).decode())
        return accept_peer(listening, key, expected, limit_s)


def _connected(place: GroupAddress, route: Route, limit_s: float) -> socket.socket:
    """Connect to the sender, and prove that this is the peer that it waits for."""
    info = msgspec.json.decode(place.store.get(_KEY), type=_RendezvousInfo)
    connection = socket.create_connection((route.host, info.port), timeout=limit_s)
    proof = PeerProof(info.token, place.plan_digest)
    try:
        connection.sendall(route.key.frame(msgspec.msgpack.encode(proof)))
    except OSError:
        connection.close()
        raise
    return connection


def _on_device(data: BucketMemory) -> Tensor:
    if not isinstance(data, Tensor):
        raise TypeError("a bucket that is shared by its handle is a tensor")
    return data

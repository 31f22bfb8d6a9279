"""Wire that sends handles of device memory. The receiver copies the buckets from this memory.

    sender                                     receiver
    puts the handle in the store, a byte   -->  opens it, copies it into its memory
    may pack into that memory again        <--  a byte

Handles are in the store because only holders of the run's key can read and write there. The bytes
are sent over gloo, which detects immediately that the other end has closed.

A sender that gives up on a receiver may pack into memory that is still being copied. Such a copy
has a different digest, and never reaches a parameter.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch has no types for its memory shared between processes.

import threading
import weakref
from collections import defaultdict, deque
from itertools import chain
from typing import Any, Final, Protocol

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from offbeat.plugins.reshard.group import BrokenLink, GroupAddress
from offbeat.plugins.reshard.group_wire import tcp_wire
from offbeat.plugins.reshard.messages import DevicePlace, Route
from offbeat.plugins.reshard.wire import BucketLink, machine_name
from offbeat.weight_sync.chunks import BucketMemory


class HandleUnusable(Exception):
    """Handle of memory that cannot be opened. Its process may have ended."""


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
        """Return a handle of memory from ``allocate``. It is valid while this memory exists."""
        ...

    def copy(self, handle: bytes, into: Tensor) -> None:
        """Copy the memory of another process's handle. The copy is complete on return.

        Raises:
            HandleUnusable: The memory cannot be opened.
        """
        ...


class HandleWire:
    """Wire between processes of one machine that see the same devices."""

    def __init__(self, name: str, memory: SharableMemory) -> None:
        self.name, self._memory, self._pool = name, memory, _SharedPool(memory)
        self._signals = tcp_wire()

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
        signals = self._signals.link(place, route, address)
        return HandleLink(signals, place, self._memory, self._pool)


class _SharedPool:
    """Pool of shared memory, kept until the plan changes, because other processes may refer to it.

    A piece is lent again when its tensor is unreferenced. Its handle is created once.
    """

    def __init__(self, memory: SharableMemory) -> None:
        self._memory = memory
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._handles = dict[int, bytes]()  # by address
        self._plan = 0  # number of plan changes
        self._lock = threading.RLock()  # memory may return while the same thread holds the lock

    def lend(self, nbytes: int) -> Tensor:
        with self._lock:
            free = self._free[nbytes]
            owner = free.pop() if free else self._memory.allocate(nbytes)
            lent = owner.view(-1)  # another object with the same memory
            weakref.finalize(lent, self._reclaim, owner, self._plan).atexit = False
        return lent

    def handle(self, lent: Tensor) -> bytes:
        address = lent.data_ptr()
        with self._lock:
            if address not in self._handles:
                self._handles[address] = self._memory.handle(lent)
            return self._handles[address]

    def release(self) -> None:
        """Free idle memory now and lent memory on return."""
        with self._lock:
            self._plan += 1
            for owner in chain.from_iterable(self._free.values()):
                self._forget(owner)
            self._free.clear()

    def _reclaim(self, owner: Tensor, plan: int) -> None:
        with self._lock:
            if plan == self._plan:
                self._free[owner.nbytes].append(owner)
            else:
                self._forget(owner)

    def _forget(self, owner: Tensor) -> None:
        """Forget the handle before the memory is freed, because new memory may get this address."""
        self._handles.pop(owner.data_ptr(), None)


class BucketHandle(msgspec.Struct, frozen=True):
    """Bucket that is ready to be copied."""

    nbytes: int
    handle: bytes


class HandleLink:
    """One end of a link. Each bucket has two signals: it is ready, and it was copied."""

    def __init__(
        self, signals: BucketLink, place: GroupAddress, memory: SharableMemory, pool: _SharedPool
    ) -> None:
        self._signals, self._place, self._is_sender = signals, place, place.rank == 0
        self._memory, self._pool = memory, pool
        # Tag, bucket, and the signal of the other end
        self._pending = deque[tuple[int, Tensor, Tensor]]()

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def send(self, data: BucketMemory, tag: int) -> None:
        lent = _on_device(data)
        handle = msgspec.json.encode(BucketHandle(lent.nbytes, self._pool.handle(lent)))
        try:
            self._place.store.set(_key(tag), handle.decode())
        except RuntimeError as error:
            raise BrokenLink(f"the store has closed: {error}") from error
        self._signals.send(_signal(), 2 * tag)
        self._expect(lent, tag, 2 * tag + 1)

    def receive(self, into: BucketMemory, tag: int) -> None:
        self._expect(_on_device(into), tag, 2 * tag)

    def wait(self, timeout_s: float) -> BucketMemory:
        tag, tensor, signal = self._pending[0]
        while self._signals.wait(timeout_s) is not signal:
            pass  # a signal that this end sent before
        if not self._is_sender:
            self._copy(tag, tensor)
            self._signals.send(_signal(), 2 * tag + 1)
        self._pending.popleft()
        return tensor

    def finish(self, timeout_s: float) -> None:
        while self._pending:
            self.wait(timeout_s)
        while self._signals.in_flight:
            self._signals.wait(timeout_s)

    def close(self) -> None:
        self._pending.clear()
        self._signals.close()

    def abort(self) -> None:
        self._pending.clear()
        self._signals.abort()

    def _expect(self, bucket: Tensor, tag: int, number: int) -> None:
        signal = _signal()
        self._signals.receive(signal, number)
        self._pending.append((tag, bucket, signal))

    def _copy(self, tag: int, into: Tensor) -> None:
        try:
            found = msgspec.json.decode(self._place.store.get(_key(tag)), type=BucketHandle)
        except RuntimeError as error:
            raise BrokenLink(f"the store has closed: {error}") from error
        if found.nbytes != into.nbytes:
            raise BrokenLink(f"bucket {tag} has {found.nbytes} bytes, expected {into.nbytes}")
        try:
            self._memory.copy(found.handle, into)
        except HandleUnusable as unusable:
            raise BrokenLink(str(unusable)) from unusable


def _key(tag: int) -> str:
    return f"handle/{tag}"


def _signal() -> Tensor:
    return torch.ones(1, dtype=torch.uint8)


def _on_device(data: BucketMemory) -> Tensor:
    if not isinstance(data, Tensor):
        raise TypeError("a bucket that is shared by its handle is a tensor")
    return data


class CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """Handle with which another process opens memory of this process."""

    device: str  # UUID, because device numbers differ between processes
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


_decode: Final = msgspec.msgpack.Decoder(CudaHandle).decode


def device_numbers() -> dict[str, int]:
    """Return the numbers of all devices that this process sees, by UUID."""
    count = torch.cuda.device_count()
    return {f"GPU-{torch.cuda.get_device_properties(each).uuid}": each for each in range(count)}


class CudaMemory:
    """Memory of one CUDA device.

    Not run yet: ``make test-gpu`` runs it on a GPU. The stand-in of the CPU tests passes the same
    contract.
    """

    def __init__(self, device: str) -> None:
        """``device``: as torch names it. Without a number, the first device of this process."""
        number = torch.device(device).index or 0
        self._device = torch.device("cuda", number)
        uuid = next(uuid for uuid, each in device_numbers().items() if each == number)
        self.place = DevicePlace(machine_name(), uuid)

    def sees(self, device: str) -> bool:
        return device in device_numbers()

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def handle(self, tensor: Tensor) -> bytes:
        args: Any = reductions.reduce_tensor(tensor)[1]
        *_, handle, size, offset, _, counter, counter_offset, event, waits = args
        shared = CudaHandle(
            self.place.device, handle, size, offset, counter, counter_offset, event, waits
        )
        return msgspec.msgpack.encode(shared)

    def copy(self, handle: bytes, into: Tensor) -> None:
        shared = _decode(handle)
        fields = {
            name: getattr(shared, name) for name in shared.__struct_fields__ if name != "device"
        }
        try:
            opened = reductions.rebuild_cuda_tensor(
                tensor_cls=Tensor,
                tensor_size=into.shape,
                tensor_stride=into.stride(),
                tensor_offset=0,
                storage_cls=torch.UntypedStorage,
                dtype=torch.uint8,
                storage_device=device_numbers()[shared.device],
                requires_grad=False,
                **fields,
            )
            into.copy_(opened)
            torch.cuda.current_stream(into.device).synchronize()
        except RuntimeError as error:
            raise HandleUnusable(f"memory of {shared.device} cannot be opened: {error}") from error

"""What stands in for CUDA on the wires of a reshard: the same protocols over main memory.

``cuda_ipc``: handles name shared memory of the process that packed it, which only a process of the
same machine can open, and nobody once that process has ended. ``nccl``: groups of gloo, which connect
in their first message.
"""

# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false
# torch declares less than it exports, and not all types.

import mmap
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import ProcessGroupGloo

from offbeat.plugins.reshard.eager_groups import EagerGroups
from offbeat.plugins.reshard.group import Device, GroupAddress
from offbeat.plugins.reshard.group_wire import GroupWire, tcp_wire
from offbeat.plugins.reshard.handle_wire import HandleUnusable, HandleWire
from offbeat.plugins.reshard.messages import DevicePlace
from offbeat.plugins.reshard.wire import BucketWire, machine_name

Named = tuple[int, int, int]
"""Process, file of that process, bytes."""


class SharedMemory:
    """Main memory under the protocol of CUDA-IPC."""

    def __init__(self, device: str = "GPU-0", machine: str = "") -> None:
        self.place = DevicePlace(machine or machine_name(), device)
        self._files = dict[int, int]()  # by address
        self.allocated = 0  # bytes that nobody has freed

    def sees(self, device: str) -> bool:
        return device == self.place.device

    def allocate(self, nbytes: int) -> Tensor:
        file = os.memfd_create("bucket", os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
        mapped = mmap.mmap(file, nbytes)
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        self._files[tensor.data_ptr()] = file
        weakref.finalize(mapped, self._free, file, nbytes).atexit = False
        self.allocated += nbytes
        return tensor

    def _free(self, file: int, nbytes: int) -> None:
        os.close(file)
        self.allocated -= nbytes

    def handle(self, tensor: Tensor) -> bytes:
        named = os.getpid(), self._files[tensor.data_ptr()], tensor.nbytes
        return msgspec.msgpack.encode(named)

    def copy(self, handle: bytes, into: Tensor) -> None:
        process, file, nbytes = msgspec.msgpack.decode(handle, type=Named)
        try:
            with Path(f"/proc/{process}/fd/{file}").open("r+b") as opened:
                mapped = mmap.mmap(opened.fileno(), nbytes)
        except OSError as error:
            raise HandleUnusable(
                f"memory of process {process} cannot be opened: {error}"
            ) from error
        into.copy_(torch.frombuffer(mapped, dtype=torch.uint8))


class LazyGroup:
    """Group of gloo that connects in its first message.

    gloo's own lazy connections do not end while a peer's bytes are unread: its thread spins, and
    the last reference waits for that thread.
    """

    def __init__(self, connect: Callable[[], ProcessGroupGloo]) -> None:
        self._connect, self._group = connect, None

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        return self._connected().send(tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        return self._connected().recv(tensors, rank, tag)

    def _connected(self) -> ProcessGroupGloo:
        if self._group is None:
            self._group = self._connect()
        return self._group


class LazyGloo:
    """Groups that connect in their first message, and wait an hour for that, as NCCL's do."""

    def __init__(self, host: str) -> None:
        self._device = Device(host, 3600.0)

    def group(self, place: GroupAddress) -> LazyGroup:
        return LazyGroup(partial(self._device.group, place))

    def close(self, group: LazyGroup) -> None:
        """Do nothing, because gloo closes its connections with the last reference."""

    def abort(self, group: LazyGroup) -> None:
        """Do nothing, as ``close``."""

    def byte(self) -> Tensor:
        return self._device.byte()


def eager_gloo(host: str, connect_s: float) -> EagerGroups:
    """Make what forms such groups within a deadline, as it forms those of NCCL."""
    return EagerGroups(LazyGloo(host), connect_s)


def doubled(name: str, device: str) -> BucketWire:
    """Make one end of a wire, as ``make_wire`` does on a machine with GPUs."""
    if name == "tcp":
        return tcp_wire()
    if name == "cuda_ipc":
        return HandleWire(name, SharedMemory())
    place = DevicePlace(machine_name(), device)
    return GroupWire(name, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), eager_gloo, place)

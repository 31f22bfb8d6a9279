"""Wires over process groups of two: gloo between main memories, NCCL between devices."""

import threading
from collections.abc import Callable

from offbeat.plugins.reshard.group import Device, GroupAddress, GroupMaker, PairGroup
from offbeat.plugins.reshard.messages import DevicePlace, Route
from offbeat.plugins.reshard.wire import BucketLink
from offbeat.weight_sync.buffers import Buffers
from offbeat.weight_sync.chunks import BucketMemory

MakerOf = Callable[[str, float], GroupMaker]
"""(address of this machine, seconds to connect) -> maker of groups at this address."""


class GroupWire:
    """Wire that forms a process group per link."""

    def __init__(
        self,
        name: str,
        memory: Callable[[int], BucketMemory],
        groups: MakerOf,
        place: DevicePlace | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Create one end.

        Args:
            name: Name of the wire.
            memory: Returns memory of the given size, which is reused when it is unreferenced.
            groups: Returns a maker of process groups. Called once per address.
            place: Device of the memory, or None for main memory.
            release: Frees memory that is kept for reuse, or None if none is kept.
        """
        self.name, self.place = name, place
        self._memory, self._groups, self._release = memory, groups, release
        self._makers, self._lock = dict[str, GroupMaker](), threading.Lock()

    def refusal(self, route: Route) -> str:
        """Refuse a sender on the same device, because NCCL needs one device per rank."""
        if self.place is None or route.place != self.place:
            return ""
        device = self.place.device
        return (
            f"sync.wire={self.name} needs separate devices for sender and receiver, but both "
            f"are on {device}. Give each a separate GPU, or set sync.wire to cuda_ipc"
        )

    def memory_to_send(self, nbytes: int) -> BucketMemory:
        return self._memory(nbytes)

    def memory_to_receive(self, nbytes: int) -> BucketMemory:
        return self._memory(nbytes)

    def release_memory(self) -> None:
        if self._release is not None:
            self._release()

    def link(self, place: GroupAddress, route: Route, address: str) -> BucketLink:
        with self._lock:  # keep gloo devices: stopping and creating one per transfer is slow
            if address not in self._makers:
                self._makers[address] = self._groups(address, route.timeouts.slack_s)
            maker = self._makers[address]
        return PairGroup(place, maker)


def tcp_wire() -> GroupWire:
    """Create one end of the wire between main memories."""
    buffers = Buffers()
    return GroupWire("tcp", buffers.lend, Device, release=buffers.release)

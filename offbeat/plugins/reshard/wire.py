"""Interface of wires, which carry the buckets of a reshard from a source rank to a receiver.

A *wire* is one process's end: memory and links. A *link* carries the buckets of one request from
one sender to one receiver, in the requested order.

    tcp        arrays in main memory, gloo point to point    any two machines
    cuda_ipc   handles of device memory; copied from there   a device that both processes see
    nccl       device to device, NCCL point to point         a separate device per process

Plan, digests, limits and the transaction are in the layers above, and are the same for all wires.
"""

import socket
from pathlib import Path
from typing import Final, Protocol

from offbeat.plugins.reshard.group import GroupAddress
from offbeat.plugins.reshard.messages import DevicePlace, Route
from offbeat.weight_sync.chunks import BucketMemory

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class BucketLink(Protocol):
    """One end of a link. Every method raises ``BrokenLink`` if the other end is closed or late."""

    @property
    def in_flight(self) -> int:
        """Return the number of buckets without a completed ``wait``."""
        ...

    def send(self, data: BucketMemory, tag: int) -> None:
        """Start sending a bucket. It must not change before ``wait`` has returned it."""
        ...

    def receive(self, into: BucketMemory, tag: int) -> None:
        """Start receiving the bucket of this tag and size."""
        ...

    def wait(self, timeout_s: float) -> BucketMemory:
        """Return the oldest bucket once it is received, or no longer needed by the link."""
        ...

    def finish(self, timeout_s: float) -> None:
        """Wait until both ends have confirmed that the receiver has everything."""
        ...

    def close(self) -> None:
        """Close the connection after ``finish``."""
        ...

    def abort(self) -> None:
        """Close the connection at once. The other end detects it within a bucket's time limit."""
        ...


class BucketWire(Protocol):
    """One process's end of a wire, for links to any number of processes. Thread-safe."""

    @property
    def name(self) -> str:
        """Return the name of ``sync.wire``."""
        ...

    @property
    def place(self) -> DevicePlace | None:
        """Return the device of the buckets, or None for main memory."""
        ...

    def refusal(self, route: Route) -> str:
        """Return why nothing can be received from a sender, with a fix, or an empty string."""
        ...

    def memory_to_send(self, nbytes: int) -> BucketMemory:
        """Return memory for a bucket to pack, lent until it is unreferenced."""
        ...

    def memory_to_receive(self, nbytes: int) -> BucketMemory:
        """Return memory for a bucket to receive, lent until all its views are unreferenced."""
        ...

    def release_memory(self) -> None:
        """Free the memory of a replaced plan at once, or as soon as it is unreferenced."""
        ...

    def link(self, place: GroupAddress, route: Route, address: str) -> BucketLink:
        """Connect to the other end.

        Args:
            place: Place in the sender's store where both ends exchange addresses. The sender is
                rank 0.
            route: Address of the sender.
            address: Address of this machine for the other end.

        Raises:
            BrokenLink: The other end did not connect in time.
        """
        ...


def machine_name() -> str:
    """Return a unique name of this machine."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot_id}".strip()

"""Interface of wires: what carries the buckets of a reshard from a source rank to a receiver.

A *wire* is one process's end of it: memory, and links. A *link* carries the buckets of one request,
from one sender to one receiver, in the order in which they were asked for.

    tcp        arrays in main memory, gloo point to point    any two machines
    cuda_ipc   handles of device memory; copied from there   a device that both processes see
    nccl       device to device, NCCL point to point         devices of their own

Plan, digests, limits and the transaction are above it, and the same for all.
"""

import socket
from pathlib import Path
from typing import Final, Protocol

from offbeat.plugins.reshard.group import GroupAddress
from offbeat.plugins.reshard.messages import DevicePlace, Route
from offbeat.weight_sync.chunks import BucketMemory

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class BucketLink(Protocol):
    """One end of a link. Every method raises ``BrokenLink`` if the other end has closed, or is late."""

    @property
    def in_flight(self) -> int:
        """Return the number of buckets that nobody has waited for."""
        ...

    def send(self, data: BucketMemory, tag: int) -> None:
        """Begin to send a bucket. It must not change before ``wait`` has returned it."""
        ...

    def receive(self, into: BucketMemory, tag: int) -> None:
        """Begin to receive the bucket of this tag and size."""
        ...

    def wait(self, timeout_s: float) -> BucketMemory:
        """Return the oldest bucket: received, or not needed by the link any more."""
        ...

    def finish(self, timeout_s: float) -> None:
        """Wait until both ends know that the receiver has everything."""
        ...

    def close(self) -> None:
        """Close the connection after ``finish``."""
        ...

    def abort(self) -> None:
        """Close the connection at once; the other end detects it, at the limit of a bucket at the latest."""
        ...


class BucketWire(Protocol):
    """One process's end of a wire, for links to any number of others. Thread-safe."""

    @property
    def name(self) -> str:
        """Return the name of ``sync.wire``."""
        ...

    @property
    def place(self) -> DevicePlace | None:
        """Return the device of the buckets; None: main memory."""
        ...

    def refusal(self, route: Route) -> str:
        """Return why nothing can be received from a sender, and what to do; empty if it can."""
        ...

    def memory_to_send(self, nbytes: int) -> BucketMemory:
        """Return memory to pack a bucket into, lent until it is not referenced any more."""
        ...

    def memory_to_receive(self, nbytes: int) -> BucketMemory:
        """Return memory to receive a bucket into, lent until no view of it is referenced any more."""
        ...

    def release_memory(self) -> None:
        """Free the memory of a plan that is replaced: at once, or when it is not referenced any more."""
        ...

    def link(self, place: GroupAddress, route: Route, address: str) -> BucketLink:
        """Connect to the other end.

        Args:
            place: Where in the sender's store both ends meet: the sender at rank 0.
            route: Address of the sender.
            address: Address of this machine at which the other end reaches it.

        Raises:
            BrokenLink: The other end did not connect in time.
        """
        ...


def machine_name() -> str:
    """Return a name of this machine that no other one has."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot_id}".strip()

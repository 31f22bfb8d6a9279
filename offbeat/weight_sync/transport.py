"""Interface of transports: a sender, and handles that the controller passes to the receivers.

The controller's code is the same for all of them. The trainer *publishes* a release: a manifest
with the digests of its chunks, the release's digest, and some handles. With the handles, an engine
can receive the release, now or later. Their content depends on the transport: the chunks
themselves, addresses of memory, or the address of a sender.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.reshard.buckets import BucketRoute

Room = Callable[[int, int], Bytes]
"""(chunk index, bytes) -> memory to pack it into."""


class Source(Protocol):
    """Weights of a process, in chunks."""

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the weights that ``chunks`` yields, without a seal."""
        ...

    def chunks(
        self, room: Callable[[int, int], Bytes] | None = None
    ) -> Iterator[tuple[Bytes, str]]:
        """Yield each chunk with its digest, packed into the array ``room(index, bytes)``."""
        ...


class PackedBucket(NamedTuple):
    """A bucket of a snapshot: a chunk that holds regions of tensors."""

    bucket: int
    data: Bytes
    digest: str


@runtime_checkable
class ShardSource(Protocol):
    """Weights of one of several ranks, in the buckets that it holds."""

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the whole release, without a seal."""
        ...

    @property
    def routes(self) -> tuple[BucketRoute, ...]:
        """Return holders and senders of all buckets."""
        ...

    def packed(self, room: Room) -> Iterator[PackedBucket]:
        """Yield the buckets of this rank, packed into the arrays ``room(bucket, bytes)``."""
        ...


WeightSource = Source | ShardSource
"""Weights that rank 0 packs for all, or that each rank packs for itself."""


class PublishedRelease(NamedTuple):
    """A release as its publisher returns it."""

    manifest: Manifest  # sealed
    digest: str
    handles: tuple[Any, ...]


class Sender(Protocol):
    """The trainer's end of a transport."""

    @property
    def handles(self) -> int:
        """Return the number of handles per release."""
        ...

    def publish(self, version: int) -> PublishedRelease:
        """Publish a snapshot of the current weights, which may change as soon as this returns."""
        ...

    def close(self) -> None:
        """Stop sending. Idempotent."""
        ...


Sink = Callable[[int, Bytes], object]
"""Receives chunk ``index``. An error that it raises ends the transfer for this receiver alone."""

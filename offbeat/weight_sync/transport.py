"""Interface of transports: a sender, and handles that the controller passes to the receivers.

The controller's code is the same for all transports. The trainer *publishes* a release: a manifest
with the digests of its chunks, the release's digest, and some handles. With the handles, an engine
can receive the release, now or later. Depending on the transport, a handle contains a chunk, or the
addresses of the ranks that hold the release's parts. This module does not import torch.

It also has a sender without transfers, for engines that compute with the trainer's own tensors.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast, runtime_checkable

import msgspec

from offbeat.messages.weights import FullReason, WeightDelta, WeightRelease
from offbeat.weight_sync.buckets import BucketRoute
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.manifest import Bytes, Manifest, release_digest

if TYPE_CHECKING:
    from offbeat.weight_sync.chunks import BucketMemory


Room = Callable[[int, int], Bytes]
"""(chunk index, bytes) -> memory for the packed chunk."""

BucketRoom = Callable[[int, int], "BucketMemory"]
"""(bucket, bytes) -> memory for the packed bucket, from which it is sent."""


class Source(Protocol):
    """Weights of a process, in chunks."""

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the weights that ``chunks`` yields, without digests."""
        ...

    def chunks(
        self, room: Callable[[int, int], Bytes] | None = None
    ) -> Iterator[tuple[Bytes, str]]:
        """Yield each chunk with its digest, packed into the array ``room(index, bytes)``."""
        ...


class DigestedSource(Protocol):
    """Weights of a process that are hashed in place."""

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the weights, without digests."""
        ...

    def digests(self) -> Iterator[str]:
        """Yield the digest of each chunk without packing it."""
        ...


class PackedBucket(NamedTuple):
    """Bucket of a snapshot: a chunk that holds regions of tensors."""

    bucket: int
    data: "BucketMemory"
    digest: str


@runtime_checkable
class ShardSource(Protocol):
    """Weights of one of several ranks, in the buckets that it holds."""

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the whole release, without digests."""
        ...

    @property
    def routes(self) -> tuple[BucketRoute, ...]:
        """Return holders and senders of all buckets."""
        ...

    def pack_buckets(self, room: BucketRoom) -> Iterator[PackedBucket]:
        """Yield the buckets of this rank, packed into the arrays ``room(bucket, bytes)``."""
        ...

    def follow(self, layout: EngineLayout) -> None:
        """Cut later releases for engines of this layout. All ranks must pass the same layout."""
        ...


WeightSource = Source | ShardSource
"""Weights that rank 0 packs for all ranks, or that each rank packs itself."""


class PublishedRelease(NamedTuple):
    """Published release with its handles."""

    manifest: Manifest  # sealed
    digest: str
    handles: tuple[Any, ...]
    delta: WeightDelta | None = None  # changes since the release before, with its own handles
    full_reason: FullReason | None = None  # why ``delta`` is None although deltas are enabled


def with_handles_apart(published: PublishedRelease, delta_handles: int) -> tuple[Any, ...]:
    """Split a release: the release without handles, its handles, its delta's handles or None."""
    delta = published.delta
    changes = (None,) * delta_handles if delta is None else delta.chunks
    header = None if delta is None else msgspec.structs.replace(delta, chunks=())
    return published._replace(handles=(), delta=header), *published.handles, *changes


def make_release(
    version: int, published: PublishedRelease, handles: tuple[Any, ...], delta_handles: int
) -> WeightRelease:
    """Return a release with its handles, which arrived separately. The delta's come last."""
    delta, own = published.delta, handles[: len(handles) - delta_handles]
    if delta is not None:
        delta = msgspec.structs.replace(delta, chunks=handles[len(own) :])
    return WeightRelease(
        version=version,
        digest=published.digest,
        manifest=published.manifest,
        chunks=own,
        nbytes=published.manifest.nbytes if own else 0,
        canary=published.manifest.canary,
        delta=delta,
        full_reason=published.full_reason,
    )


class Sender(Protocol):
    """The trainer's end of a transport."""

    @property
    def handles(self) -> int:
        """Return the number of handles per release."""
        ...

    @property
    def delta_handles(self) -> int:
        """Return the number of handles of a delta, or 0 without deltas."""
        ...

    def forget(self) -> None:
        """Forget the base, because the weights were restored to another lineage."""
        ...

    def publish(self, version: int, layout: EngineLayout | None = None) -> PublishedRelease:
        """Publish a snapshot of the current weights. They may change as soon as this returns.

        If a layout is given, a sender of regions cuts this and the following releases for engines
        of this layout. All ranks must pass the same layout.
        """
        ...

    def close(self) -> None:
        """Stop sending. Idempotent."""
        ...


class ReleaseHandle(msgspec.Struct, frozen=True):
    """Handle of a release in buckets. Each transport has a subclass with its ranks' addresses."""

    version: int
    digest: str
    buckets: tuple[BucketRoute, ...]

    transport: ClassVar[str]
    """Name of the transport. Its plug-in creates the receiver."""

    def encode_senders(self) -> bytes:
        """Return, in encoded form, the data that receivers need in addition to the buckets."""
        raise NotImplementedError


class WholeShards:
    """Packs the whole tensors of a trainer with one rank: every chunk is a bucket."""

    def __init__(self, source: Source) -> None:
        self._source, self.manifest = source, source.manifest  # whole tensors, for any engine
        route = BucketRoute((0,), ((0, 0),))
        self.routes = (route,) * len(source.manifest.chunk_nbytes)

    def follow(self, layout: EngineLayout) -> None:
        """Do nothing, because whole tensors serve any layout."""
        del layout

    def pack_buckets(self, room: BucketRoom) -> Iterator[PackedBucket]:
        chunks = self._source.chunks(cast("Room", room))  # packs into any memory
        for index, (data, digest) in enumerate(chunks):
            yield PackedBucket(index, data, digest)


class InPlaceSender:
    """Sender of releases without weights. They have digests, but no handles."""

    handles = 0
    delta_handles = 0

    def __init__(self, source: DigestedSource) -> None:
        """Create the sender of ``source``, whose weights are hashed in place."""
        self._source = source

    def publish(self, version: int, layout: EngineLayout | None = None) -> PublishedRelease:
        """Return the digests of the current weights. Every transport computes the same digests.

        The digests are valid only until the weights change.
        """
        del version, layout
        manifest = self._source.manifest.seal(list(self._source.digests()))
        digest = release_digest(manifest, manifest.chunk_digests)
        return PublishedRelease(manifest, digest, ())

    def forget(self) -> None:
        """Do nothing, because no release is the base of another one."""

    def close(self) -> None:
        """Do nothing, because no thread runs."""

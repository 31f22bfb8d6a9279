"""Interface of transports: a sender, and handles that the controller passes to the receivers.

The controller's code is the same for all of them. The trainer *publishes* a release: a manifest
with the digests of its chunks, the release's digest, and some handles. With the handles, an engine
can receive the release, now or later. Their content depends on the transport: the chunks
themselves, or the addresses of the ranks that hold its parts. Loads no torch.

Transport without a transfer: engines compute with the tensors that the trainer updates.
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
"""(chunk index, bytes) -> memory to pack it into."""

BucketRoom = Callable[[int, int], "BucketMemory"]
"""(bucket, bytes) -> memory to pack it into, where its wire sends from."""


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


class DigestedSource(Protocol):
    """Weights of a process that are hashed where they are."""

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the weights, without a seal."""
        ...

    def digests(self) -> Iterator[str]:
        """Yield the digest of each chunk, as if it were packed."""
        ...


class PackedBucket(NamedTuple):
    """A bucket of a snapshot: a chunk that holds regions of tensors."""

    bucket: int
    data: "BucketMemory"
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

    def packed(self, room: BucketRoom) -> Iterator[PackedBucket]:
        """Yield the buckets of this rank, packed into the arrays ``room(bucket, bytes)``."""
        ...

    def follow(self, layout: EngineLayout) -> None:
        """Cut further releases for engines of this layout; all ranks are given the same."""
        ...


WeightSource = Source | ShardSource
"""Weights that rank 0 packs for all, or that each rank packs for itself."""


class PublishedRelease(NamedTuple):
    """A release as its publisher returns it."""

    manifest: Manifest  # sealed
    digest: str
    handles: tuple[Any, ...]
    delta: WeightDelta | None = None  # changes since the release before, with its own handles
    full_reason: FullReason | None = None  # why there is none, where deltas are enabled


def with_handles_apart(published: PublishedRelease, delta_handles: int) -> tuple[Any, ...]:
    """Return a release without handles, its handles, and those of its delta; None where it has none."""
    delta = published.delta
    changes = (None,) * delta_handles if delta is None else delta.chunks
    header = None if delta is None else msgspec.structs.replace(delta, chunks=())
    return published._replace(handles=(), delta=header), *published.handles, *changes


def release_of(
    version: int, published: PublishedRelease, handles: tuple[Any, ...], delta_handles: int
) -> WeightRelease:
    """Return a release whose handles arrived separately, the last ones those of its delta."""
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
        """Return the number of handles of a delta; 0: there are no deltas."""
        ...

    def forget(self) -> None:
        """Forget the last release as a base: the weights were restored to another line of versions."""
        ...

    def publish(self, version: int, layout: EngineLayout | None = None) -> PublishedRelease:
        """Publish a snapshot of the current weights, which may change as soon as this returns.

        With a layout, a sender of regions cuts this and further releases for engines of this layout;
        all ranks are given the same.
        """
        ...

    def close(self) -> None:
        """Stop sending. Idempotent."""
        ...


class ReleaseHandle(msgspec.Struct, frozen=True):
    """Handle of a release in buckets. The transport derives a class with the addresses of its ranks."""

    version: int
    digest: str
    buckets: tuple[BucketRoute, ...]

    transport: ClassVar[str]
    """Name of the transport, whose plug-in makes what receives the release."""

    def encode_senders(self) -> bytes:
        """Return what the receivers of an engine need in addition to the buckets, which they know."""
        raise NotImplementedError


class WholeShards:
    """Packs the whole tensors of a trainer of one rank: every chunk is a bucket."""

    def __init__(self, source: Source) -> None:
        self._source, self.manifest = source, source.manifest  # of whole tensors, for any engine
        route = BucketRoute((0,), ((0, 0),))
        self.routes = (route,) * len(source.manifest.chunk_nbytes)

    def follow(self, layout: EngineLayout) -> None:
        """Do nothing: whole tensors hold what any rank needs."""
        del layout

    def packed(self, room: BucketRoom) -> Iterator[PackedBucket]:
        chunks = self._source.chunks(cast("Room", room))  # they are packed into any memory
        for index, (data, digest) in enumerate(chunks):
            yield PackedBucket(index, data, digest)


class InPlaceSender:
    """Sender whose releases name the weights and hold none: they have digests, but no handles."""

    handles = 0
    delta_handles = 0

    def __init__(self, source: DigestedSource) -> None:
        """``source``: the weights, which are hashed where they are."""
        self._source = source

    def publish(self, version: int, layout: EngineLayout | None = None) -> PublishedRelease:
        """Return the digests of the current weights, equal to those of any other transport.

        They name the weights only until these change.
        """
        del version, layout
        manifest = self._source.manifest.sealed(list(self._source.digests()))
        digest = release_digest(manifest, manifest.chunk_digests)
        return PublishedRelease(manifest, digest, ())

    def forget(self) -> None:
        """Do nothing: no release is the base of another one."""

    def close(self) -> None:
        """Do nothing: there is no thread to stop."""

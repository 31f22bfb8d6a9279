"""Interface of the plug-in that sends a release by what it changes, its *delta*, for ``sync.delta``.

    trainer rank  packs each release with its changes since the one before, the *base*
    engine        keeps the release that it serves, and rebuilds the next one from its changes

Without ``sync.delta`` a rank packs with ``FullPacker``, and an engine keeps ``NoBase``. A plug-in
imports this module when the models of a recipe are checked, so it imports no arrays.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, cast

import msgspec

from offbeat.config.problems import Clash
from offbeat.doors import find_only
from offbeat.messages.failures import BaseRefused
from offbeat.messages.finding import Finding
from offbeat.messages.weights import FullReason, WeightDelta, WeightRelease

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.weight_sync.chunks import BucketMemory
    from offbeat.weight_sync.manifest import Bytes, Manifest
    from offbeat.weight_sync.transport import BucketRoom, PackedBucket, ShardSource


class BucketChange(msgspec.Struct, frozen=True, array_like=True):
    """Encoded changes of one bucket, as ranks describe them to each other."""

    digest: str
    nbytes: int
    words: int  # that changed


class ShardChanges(msgspec.Struct, frozen=True):
    """Changes of the buckets of one rank, as it describes them to the others."""

    base: str = ""  # digest of the release that they apply to; empty: this rank has none
    buckets: Mapping[int, BucketChange] = {}
    is_too_large: bool = False  # they exceed the largest delta, so not all were encoded


class PackedShard(NamedTuple):
    """The buckets of one rank, and what they change of its base."""

    buckets: "list[PackedBucket]"
    parts: "dict[int, Bytes]"  # encoded changes by bucket
    changes: ShardChanges


class ReleasePacker(Protocol):
    """Packs the releases of one rank, one after the other."""

    def pack(self, source: "ShardSource", room: "BucketRoom") -> PackedShard:
        """Pack a release into the arrays ``room(bucket, bytes)``. A failure leaves no base."""
        ...

    def agree(
        self,
        by_rank: Sequence[ShardChanges],
        release: "Manifest",
        digest: str,
        names: Callable[[int], str],
        /,
    ) -> tuple[WeightDelta | None, FullReason | None]:
        """Return the delta of all ranks, without handles, or why there is none. The same on every rank.

        Args:
            by_rank: Changes of each rank's buckets.
            release: Manifest of the release that the delta makes.
            digest: Digest of that release.
            names: Returns the names of the tensors of a bucket, for the error.

        Raises:
            ReplicasDiverged: Two ranks have other changes of the same bucket.
        """
        ...

    def published(self, digest: str, layout: str, buckets: "Mapping[int, BucketMemory]") -> None:
        """Keep these buckets as the base of the next release.

        Args:
            digest: Digest of the release that all ranks have published.
            layout: Digest of its plan.
            buckets: What this rank holds of it.
        """
        ...

    def forget(self) -> None:
        """Forget the base: the next release has no delta."""
        ...


class FullPacker:
    """Packs releases without deltas."""

    def pack(self, source: "ShardSource", room: "BucketRoom") -> PackedShard:
        return PackedShard(list(source.packed(room)), {}, ShardChanges())

    def agree(self, *_: object) -> tuple[None, None]:
        """Return no delta, and no reason: none was requested."""
        return None, None

    def published(self, digest: str, layout: str, buckets: "Mapping[int, BucketMemory]") -> None:
        """Keep nothing."""

    def forget(self) -> None:
        """Do nothing: there is no base."""


class CheckedBase(Protocol):
    """Release that a delta applies to, as an engine keeps it."""

    def rebuild(
        self, epoch: int, release: WeightRelease, delta: WeightDelta, parts: "tuple[Bytes, ...]"
    ) -> "tuple[Bytes, ...]":
        """Verify the chunks of a delta, and return those of its release. Blocks.

        Raises:
            TransferRefused: A part is missing or another one, or the base has another layout.
        """
        ...


class KeptRelease(Protocol):
    """The release that an engine serves, kept so that a delta can be applied to it."""

    def check(self, version: int, base: str, served: str | None) -> CheckedBase:
        """Return the base of a delta.

        Args:
            version: Version that the delta makes.
            base: Digest of the release that the delta was made against.
            served: Digest of the release that the engine serves; None: none of this run.

        Raises:
            BaseRefused: The engine serves another release, or has not kept it.
        """
        ...

    def serves(self, digest: str, manifest: "Manifest", chunks: "tuple[Bytes, ...]") -> None:
        """Keep the chunks of the release that the engine serves from now on.

        None, where its workers keep theirs, and rebuild them.
        """
        ...

    def forget(self) -> None:
        """Forget the release: the next delta is refused."""
        ...


class NoBase:
    """Keeps nothing, so every delta is refused."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def check(self, version: int, base: str, served: str | None) -> NoReturn:
        raise BaseRefused(self._engine, version, base, None if served == base else served)

    def serves(self, digest: str, manifest: "Manifest", chunks: "tuple[Bytes, ...]") -> None:
        """Keep nothing."""

    def forget(self) -> None:
        """Do nothing: there is no base."""


class DeltaPlugin(ABC):
    """Makes the deltas of trainer ranks, and applies them in engines."""

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that do not go together with deltas."""
        del config
        yield from ()

    def check(self, config: "RunConfig") -> Iterator[Finding]:
        """Yield findings for ``offbeat check``."""
        del config
        yield from ()

    @abstractmethod
    def make_packer(self) -> ReleasePacker:
        """Return what packs the releases of a trainer rank with their deltas."""

    @abstractmethod
    def keep_release(self, engine: str) -> KeptRelease:
        """Return what keeps the release that an engine serves; at first there is none."""

    @abstractmethod
    def rebuild_buckets(
        self,
        epoch: int,
        release: "Manifest",
        buckets: Sequence[int],
        base: "Sequence[BucketMemory]",
        parts: "Sequence[BucketMemory]",
    ) -> "tuple[Bytes, ...]":
        """Return some buckets of a release, verified, from those of its base and their changes.

        Args:
            epoch: Epoch of the transfer.
            release: Its sealed manifest.
            buckets: Which of its buckets.
            base: These buckets of the base; they are not changed.
            parts: Their changes, verified.

        Raises:
            TransferRefused: The changes are not of these buckets: what they make is not of the release.
        """


def find_delta() -> DeltaPlugin:
    """Return the plug-in of deltas.

    Raises:
        PluginUnusable: No package brings it, or its import fails.
    """
    return cast("DeltaPlugin", find_only("release_form"))


def make_packer(*, delta: bool) -> ReleasePacker:
    """Return what packs the releases of a trainer rank, with deltas or without.

    Raises:
        PluginUnusable: There are to be deltas, and no package brings them, or its import fails.
    """
    return find_delta().make_packer() if delta else FullPacker()


def keep_release(engine: str, *, delta: bool) -> KeptRelease:
    """Return what keeps the release that an engine serves, or keeps none without deltas.

    Raises:
        PluginUnusable: There are to be deltas, and no package brings them, or its import fails.
    """
    return find_delta().keep_release(engine) if delta else NoBase(engine)

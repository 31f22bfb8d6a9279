"""Interface of the plug-in of ``sync.delta``, which sends only a release's changes, its *delta*.

    trainer rank  packs each release with its changes since the previous one, the *base*
    engine        keeps the served release and rebuilds the next one from the changes

Without ``sync.delta`` a rank packs with ``FullPacker``, and an engine keeps ``NoBase``. A plug-in
imports this module while a recipe's models are checked, so this module must not import array
libraries.
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
    """Description of one bucket's encoded changes, exchanged between ranks."""

    digest: str
    nbytes: int
    words: int  # that changed


class ShardChanges(msgspec.Struct, frozen=True):
    """Description of one rank's changed buckets, exchanged between ranks."""

    base: str = ""  # digest of the release that they change; empty if this rank has none
    buckets: Mapping[int, BucketChange] = {}
    is_too_large: bool = False  # they exceed the largest delta, so not all were encoded


class PackedShard(NamedTuple):
    """Buckets of one rank, and their changes since its base."""

    buckets: "list[PackedBucket]"
    parts: "dict[int, Bytes]"  # encoded changes by bucket
    changes: ShardChanges


class ReleasePacker(Protocol):
    """Packs the releases of one rank, one after the other."""

    def pack(self, source: "ShardSource", room: "BucketRoom") -> PackedShard:
        """Pack a release into the arrays ``room(bucket, bytes)``. If it fails, discard the base."""
        ...

    def agree(
        self,
        by_rank: Sequence[ShardChanges],
        release: "Manifest",
        digest: str,
        names: Callable[[int], str],
        /,
    ) -> tuple[WeightDelta | None, FullReason | None]:
        """Return the delta of all ranks (without handles), or the reason for a full release.

        The result is the same on every rank.

        Args:
            by_rank: Changes of each rank's buckets.
            release: Manifest of the release that the delta produces.
            digest: Digest of that release.
            names: Returns the names of a bucket's tensors for the error.

        Raises:
            ReplicasDiverged: Two ranks have different changes for the same bucket.
        """
        ...

    def published(self, digest: str, layout: str, buckets: "Mapping[int, BucketMemory]") -> None:
        """Keep these buckets as the base of the next release.

        Args:
            digest: Digest of the release that all ranks have published.
            layout: Digest of the release's plan.
            buckets: Buckets that this rank holds.
        """
        ...

    def forget(self) -> None:
        """Forget the base, so that the next release has no delta."""
        ...


class FullPacker:
    """Packs releases without deltas."""

    def pack(self, source: "ShardSource", room: "BucketRoom") -> PackedShard:
        return PackedShard(list(source.pack_buckets(room)), {}, ShardChanges())

    def agree(self, *_: object) -> tuple[None, None]:
        """Return neither delta nor reason, because no delta was requested."""
        return None, None

    def published(self, digest: str, layout: str, buckets: "Mapping[int, BucketMemory]") -> None:
        """Keep nothing."""

    def forget(self) -> None:
        """Do nothing: there is no base."""


class CheckedBase(Protocol):
    """Release that an engine has kept, and to which it applies a delta."""

    def rebuild(
        self, epoch: int, release: WeightRelease, delta: WeightDelta, parts: "tuple[Bytes, ...]"
    ) -> "tuple[Bytes, ...]":
        """Verify the chunks of a delta and return the chunks of the resulting release. Blocks.

        Raises:
            TransferRefused: A part is missing or wrong, or the base has a different layout.
        """
        ...


class KeptRelease(Protocol):
    """Release that an engine serves, kept as the base of deltas."""

    def check(self, version: int, base: str, served: str | None) -> CheckedBase:
        """Return the base of a delta.

        Args:
            version: Version of the release that the delta produces.
            base: Digest of the release to which the delta applies.
            served: Digest of the served release, or None if the engine serves no release of this
                run.

        Raises:
            BaseRefused: The engine serves a different release, or has not kept it.
        """
        ...

    def serves(self, digest: str, manifest: "Manifest", chunks: "tuple[Bytes, ...]") -> None:
        """Keep the chunks of the release that the engine starts to serve.

        ``chunks`` is empty if the engine's workers keep and rebuild their own chunks.
        """
        ...

    def forget(self) -> None:
        """Forget the release, so that the next delta is refused."""
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
    """Makes deltas in trainer ranks and applies them in engines."""

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that do not work with deltas."""
        del config
        yield from ()

    def check(self, config: "RunConfig") -> Iterator[Finding]:
        """Yield findings for ``offbeat check``."""
        del config
        yield from ()

    @abstractmethod
    def make_packer(self) -> ReleasePacker:
        """Return a packer for a trainer rank's releases and deltas."""

    @abstractmethod
    def keep_release(self, engine: str) -> KeptRelease:
        """Return an object that keeps the release an engine serves. It is empty at first."""

    @abstractmethod
    def rebuild_buckets(
        self,
        epoch: int,
        release: "Manifest",
        buckets: Sequence[int],
        base: "Sequence[BucketMemory]",
        parts: "Sequence[BucketMemory]",
    ) -> "tuple[Bytes, ...]":
        """Rebuild and verify some buckets of a release from its base and the changes.

        Args:
            epoch: Epoch of the transfer.
            release: Sealed manifest of the release.
            buckets: Indices of the buckets to rebuild.
            base: The same buckets of the base. They are not modified.
            parts: Verified changes of these buckets.

        Raises:
            TransferRefused: The changes do not belong to these buckets: the result does not match
                the release.
        """


def find_delta() -> DeltaPlugin:
    """Return the plug-in of deltas.

    Raises:
        PluginUnusable: No package provides the plug-in, or its import fails.
    """
    return cast("DeltaPlugin", find_only("release_form"))


def make_packer(*, delta: bool) -> ReleasePacker:
    """Return a packer for a trainer rank's releases, with or without deltas.

    Raises:
        PluginUnusable: Deltas are requested, but no package provides them or its import fails.
    """
    return find_delta().make_packer() if delta else FullPacker()


def keep_release(engine: str, *, delta: bool) -> KeptRelease:
    """Return an object that keeps the release an engine serves. Without deltas it keeps nothing.

    Raises:
        PluginUnusable: Deltas are requested, but no package provides them or its import fails.
    """
    return find_delta().keep_release(engine) if delta else NoBase(engine)

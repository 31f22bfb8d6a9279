"""Delta releases: changes of a release relative to the one before it, its *base*.

    sender   packs a release, compares each chunk with the same chunk of the base (``shard_deltas``)
    engine   compares the base's digest with its served release, rebuilds the chunks of the release
             from the chunks of the base, and keeps them

Rebuilt chunks then pass the same checks as received ones: digests, coverage, commit and canary.
The first delta imports torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from offbeat.messages.failures import BaseRefused
from offbeat.messages.weights import WeightDelta, WeightRelease
from offbeat.plugins.delta.encoding import apply
from offbeat.weight_sync.dtypes import narrowest_bytes
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.transaction import Transaction

MOST_SHARE: Final = 0.5
"""Largest delta, as a share of the full release's bytes. Larger ones are not worth rebuilding."""


@dataclass(slots=True)
class HeldRelease:
    """A release with its content."""

    digest: str
    manifest: Manifest
    chunks: list[Bytes]


def delta_manifest(
    base: str, digest: str, sizes: tuple[int, ...], digests: tuple[str, ...]
) -> Manifest:
    """Return the sealed manifest of the delta that turns ``base`` into the release ``digest``."""
    about = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((base, digest, sizes)))
    return Manifest((), sizes, about, digests)


def word_bytes(manifest: Manifest) -> list[int]:
    """Return the word size of each chunk, which is its narrowest type's."""
    dtypes = [set[str]() for _ in manifest.chunk_nbytes]
    for piece in manifest.pieces:
        dtypes[piece.chunk].add(manifest.tensors[piece.tensor].dtype)
    for spec in () if manifest.pieces else manifest.tensors:
        dtypes[spec.chunk].add(spec.dtype)
    return [narrowest_bytes(*each) if each else 1 for each in dtypes]


class KeptBase:
    """The release that an engine serves, kept so that a delta can be applied to it."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._held: HeldRelease | None = None
        self._buffers: Any = None  # made for the first delta, because its module imports torch

    def lend(self, nbytes: int) -> Bytes:
        """Return memory to rebuild a chunk in. It is reused once nothing refers to it."""
        if self._buffers is None:
            from offbeat.weight_sync.buffers import Buffers  # noqa: PLC0415 -- imports torch

            self._buffers = Buffers()
        return self._buffers.lend(nbytes)

    def serves(self, digest: str, manifest: Manifest, chunks: tuple[Bytes, ...]) -> None:
        """Keep the chunks of the release that the engine serves from now on.

        There are none if the engine's workers keep and rebuild their own.
        """
        self._held = HeldRelease(digest, manifest, list(chunks))

    def forget(self) -> None:
        """Forget the release, so that the next delta is refused."""
        self._held = None

    def check(self, version: int, base: str, served: str | None) -> "CheckedRelease":
        """Return the base of a delta.

        Args:
            version: Version that the delta makes.
            base: Digest of the release that the delta was made against.
            served: Digest of the release that the engine serves, or None if it serves none of this
                run.

        Raises:
            BaseRefused: The engine serves a different release, or has not kept it.
        """
        check_base(self._engine, version, base, served)
        held = self._held
        check_base(self._engine, version, base, None if held is None else held.digest)
        assert held is not None  # noqa: S101 -- for the type checker; the digests are equal
        return CheckedRelease(held, self.lend)


class CheckedRelease(NamedTuple):
    """Base of a delta. It stays unchanged while the engine loads another release."""

    held: HeldRelease
    lend: Callable[[int], Bytes]

    def rebuild(
        self, epoch: int, release: WeightRelease, delta: WeightDelta, parts: tuple[Bytes, ...]
    ) -> tuple[Bytes, ...]:
        """Verify the chunks of a delta and return the chunks of its release.

        Raises:
            TransferRefused: A part is missing or wrong, or the base has a different layout.
        """
        check_delta(epoch, delta, parts)
        return rebuilt(epoch, self.held, release.manifest, parts, self.lend)


def check_base(engine: str, version: int, base: str, served: str | None) -> None:
    """Check that an engine serves the base of a delta.

    Raises:
        BaseRefused: It serves a different release, or none.
    """
    if served != base:
        raise BaseRefused(engine, version, base, served)


def check_delta(epoch: int, delta: WeightDelta, chunks: tuple[Bytes, ...]) -> None:
    """Check that the chunks of a delta arrived as they were sent.

    Raises:
        TransferRefused: One is missing or wrong.
    """
    arrived = Transaction("delta")
    arrived.begin(epoch, delta.manifest, {})
    for index, chunk in enumerate(chunks):
        arrived.arrived(epoch, index, chunk.nbytes, xxhash.xxh3_128_hexdigest(chunk.data))
    arrived.verify(delta.digest)


def _new(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def rebuilt(
    epoch: int,
    base: HeldRelease,
    manifest: Manifest,
    parts: tuple[Bytes, ...],
    lend: Callable[[int], Bytes] = _new,
) -> tuple[Bytes, ...]:
    """Return the chunks of a release, rebuilt from its base and its checked delta.

    Args:
        epoch: Epoch of the transfer.
        base: Release that the delta was made against. It is not changed.
        manifest: Manifest of the new release.
        parts: Chunks of the delta.
        lend: Returns memory of the given size. Default: new memory.

    Raises:
        TransferRefused: The base has a different layout, or a part does not encode changes of its
            chunk.
    """
    if not base.manifest.describes_as(manifest) or len(base.chunks) != len(parts):
        digests = base.manifest.digest, manifest.digest
        raise TransferRefused(epoch, "layout of the base", *digests)
    sized = zip(manifest.chunk_nbytes, base.chunks, parts, strict=True)
    return tuple(
        rebuilt_chunk(epoch, index, old, part, lend(nbytes))
        for index, (nbytes, old, part) in enumerate(sized)
    )


def rebuilt_chunk(epoch: int, index: int, base: Bytes, part: Bytes, into: Bytes) -> Bytes:
    """Rebuild a chunk of a release in ``into``, from its base and its changes, and return it.

    Raises:
        TransferRefused: The part does not encode changes of this chunk.
    """
    try:
        apply(part, base, into)
    except ValueError as error:
        what = f"delta of chunk {index}"
        raise TransferRefused(epoch, what, str(error), "changes of this chunk") from error
    return into

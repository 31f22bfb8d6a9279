"""Delta releases: what a release changes against the one before it, its *base*.

    sender   packs a release, compares each chunk with that of its base, keeps the release
    engine   compares the base by digest with what it serves, rebuilds the chunks of the release from
             those of the base, and keeps them

The rebuilt chunks go the way of received ones: digests, coverage, commit and canary are the same.
Imports torch with the first delta only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from offbeat.messages.failures import BaseRefused
from offbeat.messages.weights import FullReason, WeightDelta
from offbeat.weight_sync.delta_encoding import apply, changed_words, encode, whole, whole_nbytes
from offbeat.weight_sync.dtypes import narrowest_bytes
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest, release_digest
from offbeat.weight_sync.transaction import Transaction
from offbeat.weight_sync.transport import Source

MOST_SHARE: Final = 0.5
"""Largest delta, in bytes of the full release: above it, the saving is not worth the rebuilding."""


@dataclass(slots=True)
class HeldRelease:
    """A release of which the content is kept."""

    digest: str
    manifest: Manifest
    chunks: list[Bytes]


class PackedRelease(NamedTuple):
    """The content of a release, and of its delta."""

    manifest: Manifest  # sealed
    digest: str
    chunks: tuple[Bytes, ...]
    delta: WeightDelta | None  # None: there is none
    full_reason: FullReason | None  # why there is none; None: there is one, or none was asked for


class DeltaPacker:
    """Packs releases of one source, each with its delta against the one before.

    Chunk by chunk the new release takes the place of its base, so a sender that keeps its newest
    release anyway needs memory for one chunk more. A failure leaves no base.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._base: HeldRelease | None = None

    def forget(self) -> None:
        """Forget the base: the next release has no delta."""
        self._base = None

    def pack(self, source: Source) -> PackedRelease:
        """Pack a release into new arrays."""
        base, self._base = self._base, None
        if base is not None and not base.manifest.describes_as(source.manifest):
            base = None
        encoder = None if base is None else _Encoder(base)
        chunks, digests = list[Bytes](), list[str]()
        for index, (chunk, digest) in enumerate(source.chunks()):
            if encoder is not None:
                encoder.take(index, chunk)
            chunks.append(chunk)
            digests.append(digest)
        manifest = source.manifest.sealed(digests)
        digest, delta, reason = release_digest(manifest, digests), None, None
        if self._enabled:
            self._base = HeldRelease(digest, manifest, chunks)
            delta, reason = (None, FullReason.NO_BASE) if encoder is None else encoder.delta(digest)
        return PackedRelease(manifest, digest, tuple(chunks), delta, reason)


class _Encoder:
    """Encodes the chunks of a release against those of its base, which it gives up one by one."""

    def __init__(self, base: HeldRelease) -> None:
        self._base, self._manifest = base, base.manifest
        self._widths = word_bytes(base.manifest)
        # None: the chunk itself, which is copied only if there is going to be a delta
        self._parts, self._changed = list[Bytes | None](), 0
        self._left = int(MOST_SHARE * base.manifest.nbytes)  # bytes; negative: too large

    def take(self, index: int, chunk: Bytes) -> None:
        if self._left >= 0:
            part = encode(self._base.chunks[index], chunk, self._widths[index])
            if part is None:
                self._changed += chunk.nbytes // self._widths[index]
                self._left -= whole_nbytes(chunk)
            else:
                self._changed += changed_words(part)
                self._left -= part.nbytes
            self._parts.append(part)
        self._base.chunks[index] = chunk  # its former memory may be lent again

    def delta(self, digest: str) -> tuple[WeightDelta | None, FullReason | None]:
        """Return the delta that makes the release with this digest, or why there is none."""
        if self._left < 0:
            return None, FullReason.TOO_LARGE
        parts = tuple(
            whole(chunk) if part is None else part
            for part, chunk in zip(self._parts, self._base.chunks, strict=True)
        )
        base, sizes = self._base.digest, tuple(each.nbytes for each in parts)
        digests = tuple(xxhash.xxh3_128_hexdigest(each.data) for each in parts)
        manifest = delta_manifest(base, digest, sizes, digests)
        words = sum(
            nbytes // width
            for nbytes, width in zip(self._manifest.chunk_nbytes, self._widths, strict=True)
        )
        delta = WeightDelta(
            base=base,
            digest=release_digest(manifest, digests),
            manifest=manifest,
            chunks=parts,
            nbytes=manifest.nbytes,
            changed=self._changed / max(words, 1),
        )
        return delta, None


def delta_manifest(
    base: str, digest: str, sizes: tuple[int, ...], digests: tuple[str, ...]
) -> Manifest:
    """Return the sealed manifest of the changes that make the release ``digest`` of ``base``."""
    about = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((base, digest, sizes)))
    return Manifest((), sizes, about, digests)


def word_bytes(manifest: Manifest) -> list[int]:
    """Return the size of a word of each chunk: that of the narrowest type in it."""
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
        self._buffers: Any = None  # made for the first delta: its module imports torch

    def lend(self, nbytes: int) -> Bytes:
        """Return memory to rebuild a chunk in, used again once nothing refers to it."""
        if self._buffers is None:
            from offbeat.weight_sync.buffers import Buffers  # noqa: PLC0415 -- imports torch

            self._buffers = Buffers()
        return self._buffers.lend(nbytes)

    def serves(self, digest: str, manifest: Manifest, chunks: tuple[Bytes, ...]) -> None:
        """Keep the chunks of the release that the engine serves from now on.

        None, where its workers keep theirs, and rebuild them.
        """
        self._held = HeldRelease(digest, manifest, list(chunks))

    def forget(self) -> None:
        """Forget the release: the next delta is refused."""
        self._held = None

    def check(self, version: int, base: str, served: str | None) -> HeldRelease:
        """Return the base of a delta.

        Args:
            version: Version that the delta makes.
            base: Digest of the release that the delta was made against.
            served: Digest of the release that the engine serves; None: none of this run.

        Raises:
            BaseRefused: The engine serves another release, or has not kept it.
        """
        check_base(self._engine, version, base, served)
        held = self._held
        check_base(self._engine, version, base, None if held is None else held.digest)
        assert held is not None  # noqa: S101 -- for the type checker; the digests are equal
        return held


def check_base(engine: str, version: int, base: str, served: str | None) -> None:
    """Check that an engine serves the base of a delta.

    Raises:
        BaseRefused: It serves another release, or none.
    """
    if served != base:
        raise BaseRefused(engine, version, base, served)


def check_delta(epoch: int, delta: WeightDelta, chunks: tuple[Bytes, ...]) -> None:
    """Check that the chunks of a delta are those that were sent.

    Raises:
        TransferRefused: One is missing, or another one.
    """
    arrived = Transaction("delta")
    arrived.begin(epoch, delta.manifest, {})
    for index, chunk in enumerate(chunks):
        arrived.arrived(epoch, index, chunk.nbytes, xxhash.xxh3_128_hexdigest(chunk.data))
    arrived.verify(delta.digest)


def rebuilt(
    epoch: int,
    base: HeldRelease,
    manifest: Manifest,
    parts: tuple[Bytes, ...],
    lend: Callable[[int], Bytes] | None = None,
) -> tuple[Bytes, ...]:
    """Return the chunks of a release, from those of its base and its checked delta.

    Args:
        epoch: Epoch of the transfer.
        base: Release that the delta was made against; it is not changed.
        manifest: Manifest of the new release.
        parts: Chunks of the delta.
        lend: Returns memory for as many bytes; new memory by default.

    Raises:
        TransferRefused: The base has another layout, or a part is no change of its chunk.
    """
    if not base.manifest.describes_as(manifest) or len(base.chunks) != len(parts):
        digests = base.manifest.digest, manifest.digest
        raise TransferRefused(epoch, "layout of the base", *digests)
    return tuple(_rebuilt(epoch, base, manifest, parts, lend or _new))


def _rebuilt(
    epoch: int,
    base: HeldRelease,
    manifest: Manifest,
    parts: tuple[Bytes, ...],
    lend: Callable[[int], Bytes],
) -> Iterator[Bytes]:
    for index, (old, part) in enumerate(zip(base.chunks, parts, strict=True)):
        into = lend(manifest.chunk_nbytes[index])
        try:
            apply(part, old, into)
        except ValueError as error:
            what = f"delta of chunk {index}"
            raise TransferRefused(epoch, what, str(error), "changes of this chunk") from error
        yield into


def _new(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)

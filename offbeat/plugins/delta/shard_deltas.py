"""Senders' side of deltas: changes of each rank's buckets since the last release, their *base*.

    pack    a rank compares each bucket that it packs with the base's bucket, which it then replaces
    agree   ranks exchange sizes and digests of the changes: all have the same delta, or none

Every rank that holds a bucket offers its changes, so copies can replace each other here too. Over
the object store one rank has all buckets, which are the chunks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offbeat.messages.weights import FullReason, WeightDelta
from offbeat.plugins.delta.encoding import count_changed_words, encode, whole
from offbeat.plugins.delta.kept_release import (
    MOST_SHARE,
    delta_manifest,
    rebuilt_chunk,
    word_bytes,
)
from offbeat.weight_sync.buckets import agree_on_digests
from offbeat.weight_sync.delta_plugin import BucketChange, PackedShard, ShardChanges
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest, digest_bytes, on_host, release_digest
from offbeat.weight_sync.transport import BucketRoom, PackedBucket, ShardSource

if TYPE_CHECKING:
    from offbeat.weight_sync.chunks import BucketMemory


@dataclass(frozen=True, slots=True)
class _HeldShard:
    """A release with this rank's buckets of it."""

    digest: str
    layout: str  # digest of the plan
    buckets: "dict[int, BucketMemory]"


class ShardDeltas:
    """Packs the releases of one rank, each with its changes since the one before.

    The new release replaces its base bucket by bucket. A failure leaves no base.
    """

    def __init__(self) -> None:
        self._base: _HeldShard | None = None

    def forget(self) -> None:
        """Forget the base, so that the next release has no delta."""
        self._base = None

    def pack(self, source: ShardSource, room: BucketRoom) -> PackedShard:
        """Pack a release into the arrays ``room(bucket, bytes)``."""
        base, self._base = self._base, None
        if base is None or base.layout != source.manifest.digest:
            return PackedShard(list(source.pack_buckets(room)), {}, ShardChanges())
        widths, packed = word_bytes(source.manifest), list[PackedBucket]()
        parts, changes = dict[int, Bytes](), dict[int, BucketChange]()
        left = MOST_SHARE * source.manifest.nbytes
        for each in source.pack_buckets(room):
            packed.append(each)
            old, width = base.buckets.pop(each.bucket), widths[each.bucket]
            if left >= 0:
                part, words = _encode_bucket(on_host(old), on_host(each.data), width)
                left -= part.nbytes
                parts[each.bucket] = part
                changes[each.bucket] = BucketChange(digest_bytes(part), part.nbytes, words)
            del old  # its memory may be lent to the next bucket
        return PackedShard(packed, parts, ShardChanges(base.digest, changes, left < 0))

    def published(self, digest: str, layout: str, buckets: "Mapping[int, BucketMemory]") -> None:
        """Keep these buckets as the base of the next release.

        Args:
            digest: Digest of the release that all ranks have published.
            layout: Digest of its plan.
            buckets: This rank's buckets of the release.
        """
        self._base = _HeldShard(digest, layout, dict(buckets))

    def agree(
        self,
        by_rank: Sequence[ShardChanges],
        release: Manifest,
        digest: str,
        names: Callable[[int], str],
    ) -> tuple[WeightDelta | None, FullReason | None]:
        """Return the delta of all ranks, or the reason for none, as ``agree_on_delta`` does."""
        return agree_on_delta(by_rank, release, digest, names)


def _encode_bucket(old: Bytes, new: Bytes, width: int) -> tuple[Bytes, int]:
    """Return the encoded changes of a bucket, and the number of changed words."""
    part = encode(old, new, width)
    if part is None:
        return whole(new), new.nbytes // width
    return part, count_changed_words(part)


def agree_on_delta(
    by_rank: Sequence[ShardChanges], release: Manifest, digest: str, names: Callable[[int], str]
) -> tuple[WeightDelta | None, FullReason | None]:
    """Return the delta of all ranks, without handles, or the reason for none; equal on all ranks.

    Args:
        by_rank: Changes of each rank's buckets.
        release: Manifest of the release that the delta makes.
        digest: Digest of that release.
        names: Returns the names of the tensors of a bucket, for the error.

    Raises:
        ReplicasDiverged: Two ranks have different changes of the same bucket.
    """
    base = by_rank[0].base
    if not base or any(each.base != base for each in by_rank):
        return None, FullReason.NO_BASE
    if any(each.is_too_large for each in by_rank):
        return None, FullReason.TOO_LARGE
    digests = agree_on_digests(
        [{bucket: c.digest for bucket, c in each.buckets.items()} for each in by_rank], names
    )
    changes = {bucket: c for each in by_rank for bucket, c in each.buckets.items()}
    sizes = tuple(changes[bucket].nbytes for bucket in range(len(digests)))
    if sum(sizes) > MOST_SHARE * release.nbytes:
        return None, FullReason.TOO_LARGE
    sent = delta_manifest(base, digest, sizes, digests)
    widths = word_bytes(release)
    words = sum(n // width for n, width in zip(release.chunk_nbytes, widths, strict=True))
    changed = sum(each.words for each in changes.values()) / max(words, 1)
    own = release_digest(sent, digests)
    return WeightDelta(base, own, sent, (), sent.nbytes, changed), None


def rebuilt_buckets(
    epoch: int,
    release: Manifest,
    buckets: Sequence[int],
    base: "Sequence[BucketMemory]",
    parts: "Sequence[BucketMemory]",
) -> tuple[Bytes, ...]:
    """Return verified buckets of a release, rebuilt from the base's buckets and changes.

    Args:
        epoch: Epoch of the transfer.
        release: Its sealed manifest.
        buckets: Indices of the buckets.
        base: These buckets of the base. They are not changed.
        parts: Their changes, verified.

    Raises:
        TransferRefused: The changes belong to different buckets, because a rebuilt digest is not
            the release's.
    """

    def made() -> Iterator[Bytes]:
        for bucket, old, part in zip(buckets, base, parts, strict=True):
            into = np.empty(release.chunk_nbytes[bucket], np.uint8)
            rebuilt_chunk(epoch, bucket, on_host(old), on_host(part), into)
            want, got = release.chunk_digests[bucket], digest_bytes(into)
            if got != want:
                raise TransferRefused(epoch, f"digest of rebuilt bucket {bucket}", got, want)
            yield into

    return tuple(made())

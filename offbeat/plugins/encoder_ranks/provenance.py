"""Provenance of media: finds what a lane reads among the media of its encoder rank. Numpy only.

Media are identified by a digest of their arrays. So features only reach a lane that reads the same
media, however its groups were dealt.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import xxhash

from offbeat.messages.media import Media
from offbeat.plugins.encoder_ranks.errors import ProvenanceMismatch
from offbeat.trainers.batches.packing import PackedRows


class MergedMedia(msgspec.Struct, frozen=True, eq=False):
    """Media of several prompts as one batch, and how many prompts each lane has in it."""

    media: tuple[Media, ...]  # lane after lane, each in the order in which its lane named them
    counts: tuple[int, ...]  # by lane


def digest_of(media: Media) -> str:
    """Return the digest of the media of a prompt."""
    digest = xxhash.xxh3_128()
    for name, each in sorted(media.items()):
        digest.update(f"{name} {each.dtype} {each.shape}".encode())
        digest.update(np.ascontiguousarray(each).data)
    return digest.hexdigest()


def list_digest(digests: Iterable[str]) -> int:
    """Return one number, of 63 bits, for a list of digests."""
    return xxhash.xxh3_64_intdigest("\n".join(digests).encode()) >> 1


def media_read(microbatches: Iterable[PackedRows]) -> list[Media]:
    """Return the media that microbatches read, in the order of their places, some repeatedly."""
    placed = (packed.media for packed in microbatches if packed.media is not None)
    return [media for each in placed for media in each.media]


def matched(rank: int, named: Sequence[Sequence[str]], own: Iterable[Media]) -> MergedMedia:
    """Return an encoder rank's media in the order in which its lanes named them.

    Args:
        rank: The encoder rank.
        named: By lane, the digests of the media that it reads, each once.
        own: Media of the groups that the rank got, in any order.

    Raises:
        ProvenanceMismatch: They are not exactly those that the lanes named.
    """
    there = {digest_of(media): media for media in own}
    wanted = [digest for lane in named for digest in lane]
    missing, surplus = set(wanted) - there.keys(), there.keys() - set(wanted)
    if missing or surplus:
        raise ProvenanceMismatch(rank, len(missing), len(surplus))
    return MergedMedia(tuple(there[digest] for digest in wanted), tuple(map(len, named)))

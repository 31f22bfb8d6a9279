"""Provenance of pictures: those that a lane reads, found among those of its encoder rank. Numpy only.

Pictures are known by their content: a digest over values, sizes and layout. So features can only reach
a lane that reads these very pictures, however its groups were dealt.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np
import xxhash

from offbeat.messages.media import Media
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.grid.errors import ProvenanceMismatch

_FIELDS: Final = ("kind", "values", "sizes")


class MergedMedia(msgspec.Struct, frozen=True, eq=False):
    """Pictures of several prompts as one batch, and how many prompts each lane has in it."""

    media: tuple[Media, ...]  # lane after lane, each in the order in which its lane named them
    counts: tuple[int, ...]  # by lane


def digest_of(media: Media) -> str:
    """Return the digest of the pictures of a prompt."""
    digest = xxhash.xxh3_128(media.kind.value.encode())
    for each in (media.sizes, media.values):
        digest.update(str(each.shape).encode())
        digest.update(np.ascontiguousarray(each).data)
    return digest.hexdigest()


def list_digest(digests: Iterable[str]) -> int:
    """Return one number, of 63 bits, for a list of digests."""
    return xxhash.xxh3_64_intdigest("\n".join(digests).encode()) >> 1


def pictures_read(microbatches: Iterable[PackedRows]) -> list[Media]:
    """Return the pictures that microbatches read, in the order of their places, some repeatedly."""
    placed = (packed.pictures for packed in microbatches if packed.pictures is not None)
    return [media for pictures in placed for media in pictures.media]


def matched(rank: int, named: Sequence[Sequence[str]], own: Iterable[Media]) -> MergedMedia:
    """Return an encoder rank's pictures in the order in which its lanes named them.

    Args:
        rank: The encoder rank.
        named: By lane, the digests of the pictures that it reads, each once.
        own: Pictures of the groups that the rank got, in any order.

    Raises:
        ProvenanceMismatch: They are not exactly those that the lanes named.
    """
    there = {digest_of(media): media for media in own}
    wanted = [digest for lane in named for digest in lane]
    missing, surplus = set(wanted) - there.keys(), there.keys() - set(wanted)
    if missing or surplus:
        raise ProvenanceMismatch(rank, len(missing), len(surplus))
    return MergedMedia(tuple(there[digest] for digest in wanted), tuple(map(len, named)))


def merged(media: Sequence[Media]) -> Media:
    """Return the pictures of several prompts as those of one, by what each field is.

    Values and sizes stand end to end; all are of one layout. Nothing is inferred from shapes: pictures
    of equal size would be told apart from none.

    Raises:
        TypeError: Pictures have a field that has no rule here, or are of several layouts.
    """
    fields = media[0].__struct_fields__
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise TypeError(f"pictures have {', '.join(unknown)}, and no rule says how to merge it")
    if len(kinds := {each.kind for each in media}) > 1:
        raise TypeError(f"pictures of {' and '.join(sorted(kinds))} cannot be one batch")
    values = np.concatenate([each.values for each in media])
    sizes = np.concatenate([each.sizes for each in media])
    return Media(media[0].kind, values, sizes)

"""Layouts of trainer ranks as senders of a reshard: which rank holds which part. Pure."""

from functools import cache
from typing import Final

import msgspec

from offbeat.weight_sync.buckets import BucketPlan, NamedRegion, plan_buckets
from offbeat.weight_sync.manifest import TensorMeta
from offbeat.weight_sync.region import Region

_ROWS: Final = 12
_COLUMNS: Final = 4
_BUCKET_BYTES: Final = 32  # four rows of 16 bits
_LANGUAGE: Final = ("matrix", "vector")
_TOWER: Final = ("tower matrix", "tower vector")


class SourceLayout(msgspec.Struct, frozen=True):
    """Number of trainer ranks of each kind. Encoder ranks follow the language model's ranks."""

    shards: int = 2  # ranks per copy of the language model's matrices
    copies: int = 2  # of the language model
    encoders: int = 0  # encoder ranks, which share the matrices of the vision tower

    @property
    def language_ranks(self) -> int:
        """Return the number of ranks that hold a part of the language model."""
        return self.shards * self.copies

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.language_ranks + self.encoders


@cache
def source_plan(layout: SourceLayout) -> BucketPlan:
    """Return the buckets of a minimal model.

    Each side has one matrix and one vector. A rank holds one shard of its side's matrix and the
    whole vector. The sides are the language model and, with encoder ranks, the vision tower.
    """
    held = [
        _held(_LANGUAGE, rank % layout.shards, layout.shards)
        for rank in range(layout.language_ranks)
    ]
    held += [_held(_TOWER, rank, layout.encoders) for rank in range(layout.encoders)]
    names = _LANGUAGE + (_TOWER if layout.encoders else ())
    shapes = dict(zip(names, 2 * [(_ROWS, _COLUMNS), (_COLUMNS,)], strict=False))
    tensors = [TensorMeta(name, shape, "bfloat16") for name, shape in shapes.items()]
    return plan_buckets(tensors, held, _BUCKET_BYTES)


def _held(names: tuple[str, str], shard: int, shards: int) -> list[NamedRegion]:
    """Return the regions of one side that a rank holds."""
    matrix, vector = names
    rows = _ROWS // shards
    mine = Region((shard * rows, 0), ((shard + 1) * rows, _COLUMNS))
    return [(matrix, mine), (vector, Region.whole((_COLUMNS,)))]


def rank_name(rank: int) -> str:
    """Return the name by which faults and errors refer to a trainer rank."""
    return f"trainer rank {rank}"

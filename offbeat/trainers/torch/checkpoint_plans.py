"""Records that ranks exchange as msgpack when they write a checkpoint together.

``torch.distributed.checkpoint`` would exchange its own records as pickles, which run code where
they arrive. These hold the part of them that a state of plain and sharded tensors needs.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # pyright: ignore[reportPrivateUsage] -- what its writer returns
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

_DTYPES: Final = {str(each): each for each in vars(torch).values() if type(each) is torch.dtype}


class PlannedWrite(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, or a part of one, that a rank plans to write."""

    name: str
    is_shard: bool
    whole: tuple[int, ...]  # shape of the tensor
    start: tuple[int, ...]  # of the part in the tensor
    shape: tuple[int, ...]  # of the part
    dtype: str


class WrittenPart(msgspec.Struct, frozen=True, array_like=True):
    """Location of a written part: its file and offset."""

    name: str
    start: tuple[int, ...] | None
    index: int | None
    nbytes: int
    file: str
    offset: int
    length: int


def planned_writes(plan: SavePlan) -> list[PlannedWrite]:
    """Convert a rank's plan to the records that are sent."""
    return [_planned(item) for item in plan.items]


def save_plan(writes: Sequence[PlannedWrite]) -> SavePlan:
    """Convert received records back to a rank's plan."""
    names = {each.name: (each.name,) for each in writes}  # where readers of the library put it
    return SavePlan([_item(each) for each in writes], planner_data=names)


def written_parts(results: Sequence[WriteResult]) -> list[WrittenPart]:
    """Convert a rank's write results to the records that are sent."""
    return [
        WrittenPart(
            each.index.fqn,
            None if each.index.offset is None else tuple(each.index.offset),
            each.index.index,
            each.size_in_bytes,
            each.storage_data.relative_path,
            each.storage_data.offset,
            each.storage_data.length,
        )
        for each in results
    ]


def write_results(parts: Sequence[WrittenPart]) -> list[WriteResult]:
    """Convert received records back to a rank's write results."""
    return [
        WriteResult(
            MetadataIndex(each.name, each.start, each.index),
            each.nbytes,
            _StorageInfo(each.file, each.offset, each.length),
        )
        for each in parts
    ]


def _planned(item: WriteItem) -> PlannedWrite:
    data = item.tensor_data
    assert data is not None  # noqa: S101 -- a state holds nothing but tensors
    return PlannedWrite(
        item.index.fqn,
        item.type is WriteItemType.SHARD,
        tuple(data.size),
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
        str(data.properties.dtype),
    )


def _item(write: PlannedWrite) -> WriteItem:
    kind = WriteItemType.SHARD if write.is_shard else WriteItemType.TENSOR
    start, shape = torch.Size(write.start), torch.Size(write.shape)
    data = TensorWriteData(
        ChunkStorageMetadata(start, shape),
        TensorProperties(_DTYPES[write.dtype]),
        torch.Size(write.whole),
    )
    return WriteItem(MetadataIndex(write.name, write.start), kind, tensor_data=data)

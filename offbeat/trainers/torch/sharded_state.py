"""Tensors in the files of all ranks, each its own shards, by ``torch.distributed.checkpoint``.

``__N_0.distcp`` is what rank N has written, ``.metadata`` says what lies where: so any number of
ranks can take them up, each reading what it needs. Tensors that all ranks hold whole are written by
the first. A rank that fails says so, and the others hear of it.
"""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from offbeat.trainers.ranks.peers import Peers, together
from offbeat.trainers.torch.checkpoint_plans import (
    PlannedWrite,
    WrittenPart,
    planned_writes,
    save_plan,
    write_results,
    written_parts,
)

METADATA: Final = ".metadata"
_PLANS: Final = msgspec.msgpack.Decoder(list[PlannedWrite])
_PARTS: Final = msgspec.msgpack.Decoder(list[WrittenPart])


def save_shards(tensors: Mapping[str, Tensor], directory: Path, peers: Peers) -> None:
    """Write tensors, from whatever device they are on; all ranks call it together.

    Of each they give their part, or all of it. What a rank has written is synced.

    Raises:
        OSError: The disk refused.
        PeerFailed: That of another rank did.
    """
    writer, leads = _Writer(directory), peers.rank == 0
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)

    def plan() -> SavePlan:
        writer.set_up_storage_writer(leads)
        planner.set_up_planner(dict(tensors), writer.storage_meta(), leads)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write() -> list[WriteResult]:
        written = writer.write_data(planner.finish_plan(plans[peers.rank]), planner)
        written.wait()
        return written.value()

    own = together(peers, "checkpoint", plan)
    # Every rank makes the plan of all of them, the same: so none has to be sent back.
    told = peers.gathered(planned_writes(own), _PLANS)
    plans, metadata = planner.create_global_plan([save_plan(each) for each in told])
    plans = writer.prepare_global_plan(plans)
    parts = peers.gathered(written_parts(together(peers, "checkpoint", write)), _PARTS)

    def finish() -> None:
        if leads:
            writer.finish(metadata, [write_results(each) for each in parts])

    together(peers, "checkpoint", finish)


def load_shards(tensors: Mapping[str, Tensor], directory: Path, peers: Peers) -> None:
    """Fill tensors with what was saved under their names; all ranks call it together.

    How many ranks saved them, and how they were cut, makes no difference.

    Raises:
        OSError: A file cannot be read, or is not what this needs.
        PeerFailed: Another rank could not go on.
    """
    # What a rank reads depends on the files and on its own part: there is nothing to agree upon.
    together(peers, "restore", lambda: _load(tensors, directory))


def saved_names(directory: Path) -> frozenset[str]:
    """Under which names there are tensors.

    Raises:
        OSError: It cannot be read, or is not what was written.
    """
    return frozenset(_Reader(directory).read_metadata().state_dict_metadata)


class _Writer(FileSystemWriter):
    """The usual one; but what it writes depends on the tensors alone, and failures say what failed."""

    def storage_meta(self) -> StorageMeta | None:
        return (
            None  # it would name this directory, which is about to be renamed, and a random number
        )

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch closes the half-written archive, which fails in turn: its words hide the disk's.
            raise _disk_failure(error) from error


class _Reader(FileSystemReader):
    """The usual one; but nothing is executed when the table of contents is read."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # noqa: ANN401 -- its signature
        with (Path(self.path) / METADATA).open("rb") as stream:
            try:
                metadata = _OnlyMetadata(stream).load()
            except Exception as error:  # bytes that are no pickle raise whatever they happen to hit
                raise OSError(f"{self.path}/{METADATA}: {error!r}") from error
        if not isinstance(metadata, Metadata) or "state_dict_metadata" not in vars(metadata):
            raise OSError(f"{self.path}/{METADATA} holds a {type(metadata).__name__}")
        metadata.storage_meta = StorageMeta()
        return metadata


class _OnlyMetadata(pickle.Unpickler):
    """Knows the classes of such a table, and no others."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:  # noqa: ANN401 -- as overridden
        allowed = _MODULES.get(module_name)
        if allowed is None or global_name not in allowed:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong in it")
        return super().find_class(module_name, global_name)


_MODULES: Final = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, each in vars(torch).items() if type(each) is torch.dtype)},
}


def _load(tensors: Mapping[str, Tensor], directory: Path) -> None:
    reader = _Reader(directory)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(dict(tensors), storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        if isinstance(error, OSError):
            raise error from failed
        raise OSError(f"{type(error).__name__}: {error}") from failed


def _disk_failure(error: BaseException) -> BaseException:
    """What a failure came from, if that was the disk."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error

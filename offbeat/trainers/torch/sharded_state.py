"""Sharded tensors in files by ``torch.distributed.checkpoint``: each rank writes its own shards.

``__N_0.distcp`` is written by rank N, ``.metadata`` is the table of contents: so any number of
ranks can load them, each reading what it needs. Tensors that are whole on all ranks are written by
rank 0. A failure of one rank is raised on all.

The library would exchange its records as pickles, which run code where they arrive; here ranks
exchange them as msgpack.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage] -- what its writer returns
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from offbeat.trainers.ranks.peers import Peers, run_on_all_ranks

T = TypeVar("T")
METADATA: Final = ".metadata"


@dataclass(frozen=True)
class _Written(WriteResult):
    """Result of a write whose location has a type, so that it can be decoded."""

    storage_data: _StorageInfo


def _decoded(kind: type, value: Any) -> Any:  # noqa: ANN401 -- one of torch's types
    """Return a shape, or what torch has under a name: a dtype, a layout or a memory format."""
    return kind(value) if kind is torch.Size else getattr(torch, value.removeprefix("torch."))


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=str)
_PACKED: Final = msgspec.msgpack.Decoder(bytes)
_PLANS: Final = msgspec.msgpack.Decoder(list[WriteItem], dec_hook=_decoded)
_PARTS: Final = msgspec.msgpack.Decoder(list[_Written], dec_hook=_decoded)


def save_shards(tensors: Mapping[str, Tensor], directory: Path, peers: Peers) -> None:
    """Write tensors, from whatever device they are on; all ranks call it together.

    Each rank passes its part of each tensor, or all of it. The written files are synced.

    Raises:
        OSError: The disk failed.
        PeerFailed: The disk of another rank failed.
    """
    writer, leads = _Writer(directory), peers.rank == 0
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)

    def plan() -> SavePlan:
        writer.set_up_storage_writer(leads)
        state = {name: each.detach() for name, each in tensors.items()}
        planner.set_up_planner(state, writer.storage_meta(), leads)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write() -> list[WriteResult]:
        written = writer.write_data(planner.finish_plan(plans[peers.rank]), planner)
        written.wait()
        return written.value()

    own = run_on_all_ranks(peers, "checkpoint", plan)
    # Every rank computes the same global plan, so that none has to be sent back.
    plans, metadata = planner.create_global_plan(
        [
            SavePlan(items, planner_data={each.index.fqn: (each.index.fqn,) for each in items})
            for items in _gather(own.items, _PLANS, peers)
        ]
    )
    plans = writer.prepare_global_plan(plans)
    parts = _gather(run_on_all_ranks(peers, "checkpoint", write), _PARTS, peers)

    def finish() -> None:
        if leads:
            writer.finish(metadata, cast("list[list[WriteResult]]", parts))

    run_on_all_ranks(peers, "checkpoint", finish)


def _gather(own: Sequence[object], decoder: msgspec.msgpack.Decoder[T], peers: Peers) -> list[T]:
    """Return the records of all ranks, decoded."""
    return [decoder.decode(each) for each in peers.all_gather(_ENCODER.encode(own), _PACKED)]


def load_shards(tensors: Mapping[str, Tensor], directory: Path, peers: Peers) -> None:
    """Fill tensors with what was saved under their names; all ranks call it together.

    The number of ranks that saved them, and their sharding, make no difference.

    Raises:
        OSError: A file cannot be read, or does not contain these tensors.
        PeerFailed: Another rank failed.
    """
    # A rank's reads depend on the files and on its own part alone: no collective is needed.
    run_on_all_ranks(peers, "restore", lambda: _load(tensors, directory))


def saved_names(directory: Path) -> frozenset[str]:
    """Return the names of the saved tensors.

    Raises:
        OSError: The table of contents cannot be read, or is damaged.
    """
    return frozenset(_Reader(directory).read_metadata().state_dict_metadata)


def saved_shapes(directory: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every saved tensor.

    Raises:
        OSError: The table of contents cannot be read, or is damaged.
    """
    entries = _Reader(directory).read_metadata().state_dict_metadata
    return {
        name: (tuple(each.size), each.properties.dtype)
        for name, each in entries.items()
        if isinstance(each, TensorStorageMetadata)
    }


class _Writer(FileSystemWriter):
    """File writer whose output depends on the tensors alone, and whose errors name their cause."""

    def storage_meta(self) -> StorageMeta | None:
        # It would name this directory, which is about to be renamed, and a random number
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch closes the half-written archive, which fails in turn and hides the disk's error.
            raise _disk_failure(error) from error


class _Reader(FileSystemReader):
    """File reader that executes no code when the table of contents is read."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # noqa: ANN401 -- its signature
        with (Path(self.path) / METADATA).open("rb") as stream:
            try:
                metadata = _OnlyMetadata(stream).load()
            except Exception as error:  # bytes that are not a pickle raise arbitrary exceptions
                raise OSError(f"{self.path}/{METADATA}: {error!r}") from error
        if not isinstance(metadata, Metadata) or "state_dict_metadata" not in vars(metadata):
            raise OSError(f"{self.path}/{METADATA} holds a {type(metadata).__name__}")
        metadata.storage_meta = StorageMeta()
        return metadata


class _OnlyMetadata(pickle.Unpickler):
    """Unpickler that accepts the classes of the table of contents only."""

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
    """Return the error of the disk that caused a failure, if there is one; else the failure."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error

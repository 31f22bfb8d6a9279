"""State of a torch rank: weights and optimizer, on disk, exported, and reset to initial values.

An export writes the weights of a causal LM to a Hugging Face directory while they are gathered.

Checkpoints contain sharded tensors in files of ``torch.distributed.checkpoint``. Each rank writes
its own shards: rank N writes ``__N_0.distcp``. ``.metadata`` is the table of contents. So any
number of ranks can load the tensors, and each rank reads only the data that it needs. Rank 0 writes
tensors that are whole on all ranks. If one rank fails, all ranks raise.

The library would exchange its records as pickles, which run code on arrival. Here ranks exchange
them as msgpack.
"""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its functions untyped. Private names are explained where they are
# used.
# torch declares some functions without types.

import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from enum import EnumMeta
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
    _StorageInfo,  # pyright: ignore[reportPrivateUsage] -- its writer returns it
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.checkpoints.weight_files import FILE_BYTES, replace_directory, write_weights
from offbeat.trainers.expert_load import SHARES, ExpertLoad
from offbeat.trainers.parts import ModelState
from offbeat.trainers.ranks.peers import Peers, run_on_all_ranks, write_on_first_rank
from offbeat.trainers.torch.loading import ModelLoader
from offbeat.trainers.torch.model import make_unfilled_model
from offbeat.trainers.torch.optimizer import STEPS, Optimizer
from offbeat.trainers.torch.sharding import Weights
from offbeat.weight_sync.chunks import find_tied_names
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.wire_format_plugin import WireFormat

_GENERATION_CONFIG: Final = "generation_config.json"
_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_model(
    weights: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    dtype: torch.dtype,
    target: Path,
    like: Path,
    peers: Peers,
    *,
    file_bytes: int = FILE_BYTES,
    beside: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write weights, config and ``like``'s tokenizer to ``target``, atomically.

    All ranks must call it. The files are equal to the files that ``save_pretrained`` writes. Rank 0
    writes them. It holds in memory the tensors of one file, and the tensors that it gathers next.
    An existing directory is replaced.

    Args:
        weights: Whole weights by name, in the order of ``iterate_weights``. All ranks must gather
            them.
        model: The trained model. This rank may hold only a part, and it may have adapters.
        dtype: Dtype of the model.
        target: The written directory.
        like: Directory of the initial model.
        peers: The ranks that gather.
        file_bytes: Maximum bytes of a file of weights.
        beside: Writes further files into the directory before it gets its name.

    Raises:
        OSError: The disk of rank 0 failed. ``target`` is unchanged.
        PeerFailed: Rank 0 failed.
    """

    def write(gathered: Iterator[tuple[str, Tensor]]) -> None:
        shell = _shell_like(model, dtype)
        with replace_directory(target, like) as staged, _plain_generation_config(shell):
            shell.save_pretrained(staged, state_dict={})  # config and code, no weights
            write_weights(_as_in_files(gathered, shell), staged, file_bytes)
            beside(staged)
            if (like / _GENERATION_CONFIG).is_file():  # the original is exported unchanged
                (staged / _GENERATION_CONFIG).unlink(missing_ok=True)

    write_on_first_rank(peers, weights, write)


def _shell_like(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a whole model without memory, which defines how the weights of ``model`` are saved."""
    shell = make_unfilled_model(model.config, dtype, trust_remote_code=bool(model.is_remote_code()))
    shell.generation_config = model.generation_config
    # Saving reverts the renaming of weights on loading
    shell._weight_conversions = model._weight_conversions  # noqa: SLF001
    return shell


@contextmanager
def _plain_generation_config(model: PreTrainedModel) -> Generator[None]:
    """Make transformers accept the model's generation config for writing.

    transformers loads configs that it refuses to write, such as a temperature without sampling. At
    the end of a run, the refusal would lose the model.
    """
    kept = model.generation_config
    tokens = {name: getattr(kept, name, None) for name in _TOKENS}
    model.generation_config = GenerationConfig(**tokens)
    try:
        yield
    finally:
        model.generation_config = kept


def _as_in_files(
    weights: Iterable[tuple[str, Tensor]], shell: PreTrainedModel
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the names and in the form of transformers' files, weight by weight.

    If one tensor in the files is made from several weights, all weights are held in memory.

    Raises:
        KeyError, ValueError: The weights do not belong to ``shell``.
    """
    names = _group_saved_names(shell)
    paired = zip(names, weights, strict=True)
    named = ((name, tensor) for _, (first, tensor) in paired for name in names[first])
    if not _are_converted_alone(shell, names):
        yield from revert_weight_conversion(shell, dict(named)).items()
        return
    for name, tensor in named:
        yield from revert_weight_conversion(shell, {name: tensor}).items()


def _group_saved_names(shell: PreTrainedModel) -> dict[str, list[str]]:
    """Return the names under which weights are saved, by first name. Tied names are saved as one.

    transformers recognizes tied tensors by their memory, so here each weight gets its own memory.
    """
    tied = find_tied_names(shell)
    ignored = shell._keys_to_ignore_on_save or ()  # noqa: SLF001 -- read by its own saving
    state = dict[str, Tensor]()
    for names in tied.values():
        state |= dict.fromkeys((each for each in names if each not in ignored), torch.empty(1))
    kept = remove_tied_weights_from_state_dict(state, shell)
    return {first: [each for each in names if each in kept] for first, names in tied.items()}


def _are_converted_alone(shell: PreTrainedModel, names: Mapping[str, list[str]]) -> bool:
    """Return whether each tensor in the files is made from a single weight."""
    state = shell.state_dict()
    saved = {each: state[each] for kept in names.values() for each in kept}

    def shapes(tensors: Mapping[str, Tensor]) -> Counter[tuple[str, tuple[int, ...]]]:
        found = revert_weight_conversion(shell, dict(tensors))
        return Counter((name, tuple(each.shape)) for name, each in found.items())

    alone = sum((shapes({name: each}) for name, each in saved.items()), Counter())
    return alone == shapes(saved)


T = TypeVar("T")
METADATA: Final = ".metadata"


@dataclass(frozen=True)
class _Written(WriteResult):
    """Result of a write with a typed location, so that it can be decoded."""

    storage_data: _StorageInfo


def _decode_value(kind: type, value: Any) -> Any:  # noqa: ANN401 -- one of torch's types
    """Return a shape, or torch's object with a given name: a dtype, a layout or a memory format."""
    return kind(value) if kind is torch.Size else getattr(torch, value.removeprefix("torch."))


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=str)
_PACKED: Final = msgspec.msgpack.Decoder(bytes)
_PLANS: Final = msgspec.msgpack.Decoder(list[WriteItem], dec_hook=_decode_value)
_PARTS: Final = msgspec.msgpack.Decoder(list[_Written], dec_hook=_decode_value)


def save_shards(tensors: Mapping[str, Tensor], directory: Path, peers: Peers) -> None:
    """Write tensors from any device. All ranks must call it together.

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
    # Every rank computes the same global plan, so no plan has to be sent back
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
    """Fill tensors with the values saved under their names. All ranks must call it together.

    They may have been saved by a different number of ranks, with a different sharding.

    Raises:
        OSError: A file cannot be read, or does not contain these tensors.
        PeerFailed: Another rank failed.
    """
    # A rank's reads depend only on the files and its own part, so no collective is needed
    run_on_all_ranks(peers, "restore", lambda: _load(tensors, directory))


def read_saved_names(directory: Path) -> frozenset[str]:
    """Return the names of the saved tensors.

    Raises:
        OSError: The table of contents cannot be read, or is damaged.
    """
    return frozenset(_Reader(directory).read_metadata().state_dict_metadata)


def read_saved_shapes(directory: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
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
    """File writer. Its output depends only on the tensors, and its errors name their cause."""

    def storage_meta(self) -> StorageMeta | None:
        # It would name this directory, which will be renamed, and a random number
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
        for name in _named_files(metadata):
            if Path(name).name != name or (Path(self.path) / name).is_symlink():
                raise OSError(f"{self.path}/{METADATA} names {name!r}, no file of its directory")
        metadata.storage_meta = StorageMeta()
        return metadata


def _named_files(metadata: Metadata) -> set[str]:
    """Return the files that a table of contents names. The table is not trusted."""
    stored: object = vars(metadata).get("storage_data")
    entries = cast("dict[object, object]", stored).values() if isinstance(stored, dict) else ()
    return {str(vars(each)["relative_path"]) for each in entries}


class _OnlyMetadata(pickle.Unpickler):
    """Unpickler that accepts only the classes of the table of contents."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:  # noqa: ANN401 -- as overridden
        if (module_name, global_name) == ("builtins", "getattr"):
            return _find_member
        allowed = _MODULES.get(module_name)
        if allowed is None or global_name not in allowed:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong in it")
        return super().find_class(module_name, global_name)


def _find_member(owner: object, name: str) -> object:
    """Return a member of an enum: Python 3.11.2 pickles it as a call of ``getattr``."""
    if not isinstance(owner, EnumMeta):
        raise pickle.UnpicklingError(f"an attribute of {owner!r} does not belong in it")
    return owner[name]


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
    """Return the disk error that caused a failure, or the failure if there was none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


_WEIGHT: Final = "weight"
_RNG: Final = "rng"


@dataclass(eq=False)
class TorchState(ModelState):
    """Trained weights of a model, the model itself, and the optimizer's state.

    Loading and resetting change the values of the weight tensors, but not the tensor objects.
    """

    model: PreTrainedModel  # this rank may hold only a part
    every: Weights  # all weights of the model
    loader: ModelLoader  # it made the model
    optimizer: Optimizer  # updates the trained weights
    identity: Identity
    _: KW_ONLY
    seed: int  # seed of torch's generator, for weights missing in the files
    expert_load: ExpertLoad | None  # only for a model with experts

    @property
    def nbytes(self) -> int:
        trained = self.optimizer.names
        held = self.loader.trained.weights.local_tensors().items()
        others = (each for name, each in held if name not in trained)
        return self.optimizer.state_nbytes + sum(each.nbytes for each in others)

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self.model.parameters())

    def iterate_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.loader.trained.weights.iterate()

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        return self.loader.trained.weights.metas()

    def held_regions(self) -> list[TensorRegion]:
        return self.every.held_regions()

    def quantize_weights(self, wire_format: WireFormat) -> AbstractContextManager[None]:
        return wire_format.trained_pass(self.model)

    def export(self, directory: Path, *, file_bytes: int = FILE_BYTES) -> None:
        weights, beside = self.loader.trained.export()
        save_model(
            weights,
            self.model,
            self.loader.dtype,
            directory,
            self.loader.path,
            self.loader.peers,
            file_bytes=file_bytes,
            beside=beside,
        )

    def save(self, directory: Path) -> None:
        save_shards(self.tensors(), directory, self.loader.peers)

    def load(self, directory: Path) -> None:
        names = run_on_all_ranks(self.loader.peers, "restore", lambda: read_saved_names(directory))
        self.optimizer.make_room(names)
        state = self.tensors()
        load_shards(state, directory, self.loader.peers)
        self.optimizer.resume_filled(self._own_steps(state[STEPS]))
        torch.set_rng_state(state[_RNG])

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts that this rank saves, with masters of 16-bit weights, without copies."""
        weights = self.loader.trained.weights.local_tensors() | self.optimizer.masters()
        return {
            **{f"{_WEIGHT}/{name}": each for name, each in weights.items()},
            **self.optimizer.moments(),
            STEPS: self.optimizer.steps(),
            **({} if self.expert_load is None else {SHARES: self.expert_load.state()}),
            _RNG: torch.get_rng_state(),
        }

    def _own_steps(self, steps: Tensor) -> Tensor:
        """Select this rank's numbers of updates [parameters] from all saved ones."""
        return steps

    def reset(self) -> None:
        torch.manual_seed(self.seed)
        if not self.loader.trained.restore():
            self.loader.refill(self.model, self.every)
        self.optimizer.reset()
        if self.expert_load is not None:
            self.expert_load.reset()

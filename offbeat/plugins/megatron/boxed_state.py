"""State of ranks that hold boxes of a model's tensors: weights in and out, checkpoints.

Each trainer chooses the modules of its boxes, and how they are cut over ranks. Ranks of several
kinds form one world. All ranks gather, digest, save and load the whole model together.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.
# torch declares some functions without types.

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from transformers import AutoConfig

from offbeat.plugins.megatron.architecture import Architecture
from offbeat.plugins.megatron.freezing import FrozenWeights
from offbeat.plugins.megatron.gathering import TensorGather
from offbeat.plugins.megatron.hf_files import as_in_files, load_boxes, view_box
from offbeat.plugins.megatron.mapping import TensorBox, is_router_bias
from offbeat.plugins.megatron.optimizer import RankState
from offbeat.plugins.megatron.state import WEIGHTS, SavedShares, save_share
from offbeat.plugins.megatron.tower import names_in_files
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.checkpoints.weight_files import FILE_BYTES, replace_directory, write_weights
from offbeat.trainers.expert_load import SHARES, ExpertLoad
from offbeat.trainers.parts import ModelState
from offbeat.trainers.ranks.peers import Peers, write_on_first_rank
from offbeat.trainers.receiver_names import file_shapes
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.wire_format_plugin import WireFormat


def file_names(model_path: Path, architecture: Architecture) -> dict[str, str]:
    """Return the names in a model's files, for tensors that have different names in the model."""
    # A model without media uses the names of its files.
    return names_in_files(model_path) if architecture.media_rules.reads_media else {}


def is_trained(box: TensorBox, frozen: FrozenWeights) -> bool:
    """Return whether a box has a gradient: a router's bias and frozen weights have none."""
    return not is_router_bias(box.tensor) and box.tensor not in frozen.names


@dataclass(eq=False)
class BoxedState(ModelState):
    """State of a rank that holds boxes of a model's tensors."""

    model_path: Path
    dtype: torch.dtype
    peers: Peers
    architecture: Architecture
    frozen: FrozenWeights
    gathering: TensorGather  # of the boxes of all ranks
    optimizer: RankState
    weights: Callable[[], dict[str, Tensor]]  # this rank's share, by the names of its parameters
    expert_load: ExpertLoad | None = None

    @property
    def boxes(self) -> list[TensorBox]:
        """Return the boxes that this rank holds."""
        return self.gathering.boxes

    @property
    def local_weights(self) -> dict[str, Tensor]:
        """Return this rank's share of the weights, by the names of its parameters."""
        return self.weights()

    # --- weights in and out ----------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        shapes = self.gathering.shapes.items()
        return sum(math.prod(shape) for name, shape in shapes if not is_router_bias(name))

    def iterate_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.gathering.all_tensors(self.local_weights)

    def metas(self) -> list[tuple[str, tuple[int, ...], str]]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [
            (name, shape, "float32" if is_router_bias(name) else dtype)
            for name, shape in self.gathering.shapes.items()
        ]

    def held_regions(self) -> list[TensorRegion]:
        weights = self._held()
        return [TensorRegion(box.tensor, box.region, view_box(weights, box)) for box in self.boxes]

    def _held(self) -> dict[str, Tensor]:
        """Return this rank's share of the weights in the memory that training updates."""
        return self.local_weights

    @contextmanager
    def quantize_weights(self, wire_format: WireFormat) -> Generator[None]:
        """Round each matrix that releases quantize to the engines' values. All ranks must call it.

        Inside the block, this rank's share of these matrices is in memory twice.
        """
        weights, mine = self.local_weights, dict[str, list[TensorBox]]()
        for box in self.boxes:
            if wire_format.converts(box.tensor, box.whole):
                mine.setdefault(box.tensor, []).append(box)
        names = {box.parameter for boxes in mine.values() for box in boxes}
        kept = {name: weights[name].detach().clone() for name in names}
        whole, cut = self.gathering.split_aligned(wire_format)
        try:
            for name in whole:
                for box in mine.get(name, ()):
                    view = view_box(weights, box)
                    view.copy_(wire_format.rounded(name, view))
            for name, tensor in self.gathering.in_batches(cut, weights):
                values = wire_format.rounded(name, tensor)
                for box in mine.get(name, ()):
                    view_box(weights, box).copy_(values[box.region.slices])
            yield
        finally:
            for name, values in kept.items():
                weights[name].copy_(values)

    def export(self, directory: Path, *, file_bytes: int = FILE_BYTES) -> None:
        def write(gathered: Iterator[tuple[str, Tensor]]) -> None:
            with replace_directory(directory, self.model_path) as staged:
                write_weights(gathered, staged, file_bytes)
                config = AutoConfig.from_pretrained(self.model_path, local_files_only=True)
                config.dtype = self.dtype
                config.save_pretrained(staged)

        write_on_first_rank(self.peers, self._weights_of_files(), write)

    def _weights_of_files(self) -> Iterator[tuple[str, Tensor]]:
        named = ((self._file_names.get(name, name), each) for name, each in self.iterate_weights())
        if not self.architecture.experts:
            return named
        return as_in_files(named, file_shapes(self.model_path))

    @cached_property
    def _file_names(self) -> dict[str, str]:
        return file_names(self.model_path, self.architecture)

    # --- the state -------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        self.identity = self._identify()

    def _identify(self) -> Identity:
        """Return the identity of the state.

        It depends on names, shapes and dtypes of the weights, and on which weights are frozen.
        """
        digest = xxhash.xxh3_128()
        for name, shape, dtype in self.metas():
            mark = " frozen" if name in self.frozen.names else ""
            digest.update(f"{name} {shape} {dtype}{mark}\n".encode())
        dtype = str(self.dtype).removeprefix("torch.")
        about = f"{self.architecture.name} of {self.parameters:,} {dtype} weights"
        about += f", {self.frozen.elements:,} of them frozen" if self.frozen.names else ""
        return Identity("megatron", about, digest.hexdigest())

    @property
    def nbytes(self) -> int:
        """Return the bytes of all ranks' shares together."""
        trained = self.parameters - self.frozen.elements
        states = trained * self.optimizer.bytes_a_weight
        return self.parameters * self.dtype.itemsize + states

    def save(self, directory: Path) -> None:
        state = self.optimizer
        kinds = {WEIGHTS: self.local_weights, **state.state()}
        owned = self.gathering.list_owned()
        whole = {} if self.expert_load is None else {SHARES: self.expert_load.state()}
        save_share(directory, dist.get_rank(), owned, kinds, state.steps, whole)

    def load(self, directory: Path) -> None:
        state = self.optimizer
        with SavedShares(directory) as saved:
            saved.fill(WEIGHTS, self.local_weights, self.boxes)
            kinds = dict[str, dict[str, Tensor]]()
            for kind in state.kinds(saved.steps):
                names = {box.parameter for box in self._trained}
                values = {name: state.like(name) for name in names}
                saved.fill(kind, values, self._trained)
                kinds[kind] = values
            state.load(kinds, saved.steps)
            if self.expert_load is not None:
                self.expert_load.state().copy_(saved.whole(SHARES))

    def reset(self) -> None:
        self._read_files()
        self.optimizer.reset()
        if self.expert_load is not None:
            self.expert_load.reset()

    def _read_files(self) -> None:
        """Fill this rank's share from the files of the model."""
        load_boxes(self.local_weights, self.boxes, self.model_path, self._file_names)

    @property
    def _trained(self) -> list[TensorBox]:
        """Return the boxes of trained parameters."""
        return [box for box in self.boxes if is_trained(box, self.frozen)]

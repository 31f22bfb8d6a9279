"""Adapters as the trained parameters of a torch trainer. The frozen model is the reference."""

# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types, and peft is an extra.

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.plugins.lora.lora import (
    ADAPTER_FOLDER,
    AdapterWeights,
    MergedWeights,
    find_adapted_modules,
    find_base,
    identity,
    inject,
    name_side,
    part_of_parameter,
    save_adapter,
    without_adapters,
)
from offbeat.plugins.lora.release import merge_matrix
from offbeat.plugins.lora.section import KIND, LoraConfig, lora_section
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.parts import TrainedWeights, torch_dtype
from offbeat.trainers.ranks.assembly import build_source
from offbeat.trainers.ranks.peers import run_on_all_ranks
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.torch.exchanged_weights import exchange_weights, gather_whole
from offbeat.trainers.torch.sharding import Weights, own
from offbeat.trainers.torch.torch_trainer import Exported, TrainedParameters
from offbeat.weight_sync.chunks import GatheredSource
from offbeat.weight_sync.manifest import Adapter
from offbeat.weight_sync.served import digest_loaded
from offbeat.weight_sync.wire_format import make_policy


@contextmanager
def merge_matrices(model: PreTrainedModel, scaling: float) -> Generator[None]:
    """Compute inside the block with ``W + scaling * B A``, rounded once to the dtype of ``W``.

    Gradients are off. All ranks must enter it together.
    """

    def exchange(path: str) -> tuple[nn.Module, nn.Module, str, Callable[[Tensor], Tensor]]:
        first, second = (model.get_submodule(name_side(path, side)) for side in "AB")

        def make(whole: Tensor) -> Tensor:
            a, b = (gather_whole(each.get_parameter("weight")) for each in (first, second))
            return merge_matrix(whole, a, b, scaling)

        return (
            model.get_submodule(path),
            model.get_submodule(find_base(model, path)),
            "weight",
            make,
        )

    with exchange_weights(map(exchange, find_adapted_modules(model))), without_adapters(model):
        yield


_DIGEST: Final = msgspec.msgpack.Decoder(str)
_PROVING: Final = 0.01
"""Value of the matrices B while gradients are compared. Any nonzero value works."""


class Adapters(TrainedParameters):
    """Adapters next to a frozen model, under the names of PEFT's files.

    Their digest and their identity include the digest of the model's files. So they are never
    loaded next to another model.
    """

    @property
    def base(self) -> str:
        return self.adapter.base

    @cached_property
    def adapter(self) -> Adapter:
        """Return base and scale of the adapters. All ranks must make the first call together."""
        path, is_first = str(self.model_path), self.peers.rank == 0
        mine = run_on_all_ranks(
            self.peers, "the model's digest", lambda: digest_loaded(path) if is_first else ""
        )
        base = self.peers.broadcast(mine, _DIGEST)
        return Adapter(base, self._lora.rank, self._lora.alpha, KIND)

    def add_to(self, model: PreTrainedModel) -> None:
        inject(model, self._lora)

    def identify(self, model: PreTrainedModel) -> Identity:
        return identity(model, self._lora, self.adapter.base)

    def hold(self, model: PreTrainedModel, every: Weights) -> None:
        self._model, self._every = model, every
        self._adapters = AdapterWeights(every)
        parts = self._adapters.local_tensors()
        self._initial = {name: own(each).clone() for name, each in parts.items()}

    @property
    def weights(self) -> TrainedWeights:
        """Return the adapters under the names of PEFT's files."""
        return self._adapters

    @property
    def merged(self) -> MergedWeights:
        """Return the full model with the adapters added."""
        return MergedWeights(self._every, self.adapter)

    def export(self) -> Exported:
        """Return the merged model, with ``adapter/`` in its directory for PEFT."""
        is_first = self.peers.rank == 0
        adapters = [(name, each.cpu()) for name, each in self.weights.iterate() if is_first]

        def beside(staged: Path) -> None:
            folder = staged / ADAPTER_FOLDER
            save_adapter(adapters, self._model, self._lora, self.model_path, folder)

        return self.merged.iterate(), beside

    def restore(self) -> bool:
        self._fill(self._initial)
        return True

    @contextmanager
    def proving(self) -> Generator[None]:
        """Set the matrices B to a nonzero value. With zeros, every gradient of A would be zero.

        Zeros are equal on all ranks, so they would prove nothing.
        """
        parts = self._adapters.local_tensors()
        second = [name for name in parts if (part := part_of_parameter(name)) and part.side == "B"]
        self._fill(dict.fromkeys(second, _PROVING))
        try:
            yield
        finally:
            self._fill(self._initial)

    def as_served(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes as engines do.

        All ranks must enter it together. In 16 bits it computes with the rounded sums of matrices
        and adapters, which differ by more than kernels do. In wider types it computes the adapters
        next to their matrices, as in training. So a wrong sum in an engine shows.
        """
        dtypes = [torch_dtype(dtype) for _, _, dtype in self.weights.metas()]
        if all(each.itemsize >= torch.float32.itemsize for each in dtypes):
            return nullcontext()
        return merge_matrices(self._model, self.adapter.scaling)

    def as_base(self) -> AbstractContextManager[None]:
        return without_adapters(self._model)

    @property
    def _lora(self) -> LoraConfig:
        return lora_section(self.trainer)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor | float]) -> None:
        """Write values into this rank's parts of adapters, by parameter name."""
        parts = self._adapters.local_tensors()
        for name, each in values.items():
            own(parts[name]).copy_(torch.as_tensor(each))


def make_source(spec: TrainerSpec, adapters: Adapters) -> GatheredSource:
    """Build one rank's weight source: the adapters, or the model with the adapters added."""
    sync = spec.config.sync
    if sync.adapter == "merged":
        whole = adapters.merged
        return build_source(spec, whole.metas(), whole.iterate)
    weights, chunk_bytes = adapters.weights, int(sync.chunk_mib * 2**20)
    return GatheredSource(
        weights.metas(), weights.iterate, chunk_bytes, make_policy(sync), adapters.adapter
    )

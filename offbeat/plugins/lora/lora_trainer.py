"""The torch trainer of low-rank adapters: the model is frozen, and so is its own reference."""

# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types, and peft is an extra.

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
    adapted_modules,
    base_of,
    identity,
    inject,
    part_of_parameter,
    save_adapter,
    side_of,
    without_adapters,
)
from offbeat.plugins.lora.release import merged
from offbeat.plugins.lora.section import KIND, LoraConfig, lora_section
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.ranks.assembly import source_of
from offbeat.trainers.ranks.peers import run_on_all_ranks
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.torch.exchanged_weights import exchanged_weights, whole_of
from offbeat.trainers.torch.proof import Witness
from offbeat.trainers.torch.rank_mesh import RankMesh
from offbeat.trainers.torch.sharding import Weights, own
from offbeat.trainers.torch.split_step import TorchTrainer
from offbeat.trainers.weights import TrainedWeights, shared_digest
from offbeat.transfer_queue.schema import REFERENCE_LOGPROBS
from offbeat.weight_sync.manifest import Adapter
from offbeat.weight_sync.served import loaded_digest
from offbeat.weight_sync.source import GatheredSource
from offbeat.weight_sync.wire_format import policy_of


@contextmanager
def merged_matrices(model: PreTrainedModel, scaling: float) -> Generator[None]:
    """Compute inside the block with ``W + scaling * B A``, rounded once to the dtype of ``W``.

    Without gradients. All ranks enter it together.
    """

    def exchange(path: str) -> tuple[nn.Module, nn.Module, str, Callable[[Tensor], Tensor]]:
        first, second = (model.get_submodule(side_of(path, side)) for side in "AB")

        def make(whole: Tensor) -> Tensor:
            a, b = (whole_of(each.get_parameter("weight")) for each in (first, second))
            return merged(whole, a, b, scaling)

        return model.get_submodule(path), model.get_submodule(base_of(model, path)), "weight", make

    with exchanged_weights(map(exchange, adapted_modules(model))), without_adapters(model):
        yield


_DIGEST: Final = msgspec.msgpack.Decoder(str)
_PROVING: Final = 0.01
"""Value of the matrices B while gradients are compared: any but zero."""


class LoraTrainer(TorchTrainer):
    """Trainer of adapters beside a frozen model.

    Its weights, digests and checkpoints are those of the adapters. The digest of the model's files
    is part of them, so that adapters never meet another base.
    """

    def weights_digest(self) -> str:
        """Compute one digest over the base and all adapters. All ranks call it together."""
        return shared_digest(self.named_weights(), self.peers, self.adapter.base)

    @property
    def weights(self) -> TrainedWeights:
        """Return the adapters under the names of PEFT's files."""
        return self._adapters

    @property
    def merged(self) -> MergedWeights:
        """Return the whole model with the adapters added."""
        return MergedWeights(self._weights, self.adapter)

    def _top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        """Return those of the weights that engines serve. All ranks call it together.

        In 16 bits these are the rounded sums of matrices and adapters, which differ by more than
        kernels do. In wider types the adapters are computed beside their matrices, as in training:
        so a sum that engines make wrongly shows.
        """
        is_rounded = self._dtype.itemsize < torch.float32.itemsize
        served = merged_matrices(self._model, self.adapter.scaling)
        with served if is_rounded else nullcontext():
            return super()._top_logprobs(prompts, count)

    def _export(self) -> tuple[Iterator[tuple[str, Tensor]], Callable[[Path], None]]:
        """Return the merged model, with ``adapter/`` in its directory for PEFT."""
        adapters = [(name, each.cpu()) for name, each in self.named_weights() if self.is_first]

        def beside(staged: Path) -> None:
            folder = staged / ADAPTER_FOLDER
            save_adapter(adapters, self._model, self._lora, self.model_path, folder)

        return self.merged.named(), beside

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _lora(self) -> LoraConfig:
        return lora_section(self._config)

    @cached_property
    def adapter(self) -> Adapter:
        """Return base and scale of the adapters. All ranks call it together for the first time."""
        path = str(self.model_path)
        mine = run_on_all_ranks(
            self.peers, "the model's digest", lambda: loaded_digest(path) if self.is_first else ""
        )
        base = self.peers.broadcast(mine, _DIGEST)
        return Adapter(base, self._lora.rank, self._lora.alpha, KIND)

    def _cut(self, model: PreTrainedModel, whole: PreTrainedModel | None) -> Weights:
        self._identity = identity(model, self._lora, self.adapter.base)
        every = super()._cut(model, whole)
        self._adapters = AdapterWeights(every)
        parts = self._adapters.local_tensors()
        self._initial = {name: own(each).clone() for name, each in parts.items()}
        return every

    def _prove_copies(self, witness: Witness, mesh: RankMesh) -> None:
        # While the matrices B are zero every gradient of A is, and zeros are equal on all ranks.
        parts = self._adapters.local_tensors()
        second = [name for name in parts if (part := part_of_parameter(name)) and part.side == "B"]
        self._fill(dict.fromkeys(second, _PROVING))
        try:
            super()._prove_copies(witness, mesh)
        finally:
            self._fill(self._initial)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor | float]) -> None:
        """Write into this rank's parts of adapters, by the names of their parameters."""
        parts = self._adapters.local_tensors()
        for name, each in values.items():
            own(parts[name]).copy_(torch.as_tensor(each))

    def _load_model(self) -> PreTrainedModel:
        model = super()._load_model()
        inject(model, self._lora)
        return model

    def _shell(self) -> PreTrainedModel:
        shell = super()._shell()
        inject(shell, self._lora)
        return shell

    def _digest_of_initial(self) -> str:
        # Of the base alone: a resume with other adapters is refused by their checkpoint, which says so.
        return self.adapter.base

    def _check_initial(self, digest: str) -> None:
        """Do nothing: a reset reads no file, as the base never changes and adapters are kept."""

    def _initialise(self) -> None:
        torch.manual_seed(self._seed)
        self._fill(self._initial)
        self._optimizer.reset()

    def _model_of(self, name: str) -> PreTrainedModel:
        return self._model if name == REFERENCE_LOGPROBS else super()._model_of(name)

    def _computing(self, name: str) -> AbstractContextManager[None]:
        return without_adapters(self._model) if name == REFERENCE_LOGPROBS else nullcontext()


def make_source(spec: TrainerSpec, trainer: LoraTrainer) -> GatheredSource:
    """Build the weight source of one rank: of the adapters, or of the model with the adapters added."""
    sync = spec.config.sync
    if sync.adapter == "merged":
        whole = trainer.merged
        return source_of(spec, whole.metas(), whole.named)
    adapters, chunk_bytes = trainer.weights, int(sync.chunk_mib * 2**20)
    return GatheredSource(
        adapters.metas(), adapters.named, chunk_bytes, policy_of(sync), trainer.adapter
    )

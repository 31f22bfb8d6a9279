"""State of a torch rank: weights and optimizer, on disk, exported and as they were first."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.checkpoints.weight_files import FILE_BYTES
from offbeat.trainers.expert_load import SHARES, ExpertLoad
from offbeat.trainers.parts import ModelState
from offbeat.trainers.ranks.peers import run_on_all_ranks
from offbeat.trainers.torch.loading import ModelLoader
from offbeat.trainers.torch.optimizer import STEPS, Optimizer
from offbeat.trainers.torch.saving import save_model
from offbeat.trainers.torch.sharded_state import load_shards, save_shards, saved_names
from offbeat.trainers.torch.sharding import Weights
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.wire_format_plugin import WireFormat

_WEIGHT: Final = "weight"
_RNG: Final = "rng"


@dataclass(eq=False)
class TorchState(ModelState):
    """Weights of a model that are trained, the model itself, and the optimizer's state.

    The weight tensors keep their identity.
    """

    model: PreTrainedModel  # of which this rank may hold a part
    every: Weights  # all weights of the model
    loader: ModelLoader  # it made the model
    optimizer: Optimizer  # it updates the weights that are trained
    identity: Identity
    _: KW_ONLY
    seed: int  # of torch's generator, for weights that the files lack
    expert_load: ExpertLoad | None  # of a model with experts

    @property
    def nbytes(self) -> int:
        trained = self.optimizer.names
        held = self.loader.trained.weights.local_tensors().items()
        others = (each for name, each in held if name not in trained)
        return self.optimizer.state_nbytes + sum(each.nbytes for each in others)

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self.model.parameters())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.loader.trained.weights.named()

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        return self.loader.trained.weights.metas()

    def held_regions(self) -> list[TensorRegion]:
        return self.every.held_regions()

    def quantized(self, wire_format: WireFormat) -> AbstractContextManager[None]:
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
        names = run_on_all_ranks(self.loader.peers, "restore", lambda: saved_names(directory))
        self.optimizer.make_room(names)
        state = self.tensors()
        load_shards(state, directory, self.loader.peers)
        self.optimizer.filled(self._own_steps(state[STEPS]))
        torch.set_rng_state(state[_RNG])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, not copies: this rank's parts, and masters for 16-bit weights."""
        weights = self.loader.trained.weights.local_tensors() | self.optimizer.masters()
        return {
            **{f"{_WEIGHT}/{name}": each for name, each in weights.items()},
            **self.optimizer.moments(),
            STEPS: self.optimizer.steps(),
            **({} if self.expert_load is None else {SHARES: self.expert_load.state()}),
            _RNG: torch.get_rng_state(),
        }

    def _own_steps(self, steps: Tensor) -> Tensor:
        """Return the numbers of updates [parameters] of this rank's parameters, of all that were saved."""
        return steps

    def reset(self) -> None:
        torch.manual_seed(self.seed)
        if not self.loader.trained.restore():
            self.loader.refill(self.model, self.every)
        self.optimizer.reset()
        if self.expert_load is not None:
            self.expert_load.reset()

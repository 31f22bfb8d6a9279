"""State of a torch rank: weights and optimizer, on disk, exported and as they were first."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Iterator
from contextlib import AbstractContextManager
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


class TorchState(ModelState):
    """Weights of a model that are trained, the model itself, and the optimizer's state.

    The weight tensors keep their identity.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        every: Weights,
        loader: ModelLoader,
        optimizer: Optimizer,
        identity: Identity,
        *,
        seed: int,
        expert_load: ExpertLoad | None,
    ) -> None:
        """Read nothing yet.

        Args:
            model: The model, of which this rank may hold a part.
            every: All of its weights.
            loader: It made the model.
            optimizer: It updates the weights that are trained.
            identity: Of the state.
            seed: Of torch's generator, for weights that the files lack.
            expert_load: Of a model with experts.
        """
        self._model, self._every, self._loader = model, every, loader
        self._trained, self._peers = loader.trained, loader.peers
        self._optimizer, self._identity, self._seed = optimizer, identity, seed
        self._expert_load = expert_load

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def nbytes(self) -> int:
        trained = self._optimizer.names
        held = self._trained.weights.local_tensors().items()
        others = (each for name, each in held if name not in trained)
        return self._optimizer.state_nbytes + sum(each.nbytes for each in others)

    @property
    def parameters(self) -> int:
        return sum(each.numel() for each in self._model.parameters())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._trained.weights.named()

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        return self._trained.weights.metas()

    def held_regions(self) -> list[TensorRegion]:
        return self._every.held_regions()

    def quantized(self, wire_format: WireFormat) -> AbstractContextManager[None]:
        return wire_format.trained_pass(self._model)

    def export(self, directory: Path, *, file_bytes: int = FILE_BYTES) -> None:
        weights, beside = self._trained.export()
        save_model(
            weights,
            self._model,
            self._loader.dtype,
            directory,
            self._loader.path,
            self._peers,
            file_bytes=file_bytes,
            beside=beside,
        )

    def save(self, directory: Path) -> None:
        save_shards(self.tensors(), directory, self._peers)

    def load(self, directory: Path) -> None:
        names = run_on_all_ranks(self._peers, "restore", lambda: saved_names(directory))
        self._optimizer.make_room(names)
        state = self.tensors()
        load_shards(state, directory, self._peers)
        self._optimizer.filled(self._own_steps(state[STEPS]))
        torch.set_rng_state(state[_RNG])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, not copies: this rank's parts, and masters for 16-bit weights."""
        weights = self._trained.weights.local_tensors() | self._optimizer.masters()
        return {
            **{f"{_WEIGHT}/{name}": each for name, each in weights.items()},
            **self._optimizer.moments(),
            STEPS: self._optimizer.steps(),
            **({} if self._expert_load is None else {SHARES: self._expert_load.state()}),
            _RNG: torch.get_rng_state(),
        }

    def _own_steps(self, steps: Tensor) -> Tensor:
        """Return the numbers of updates [parameters] of this rank's parameters, of all that were saved."""
        return steps

    def reset(self) -> None:
        torch.manual_seed(self._seed)
        if not self._trained.restore():
            self._loader.refill(self._model, self._every)
        self._optimizer.reset()
        if self._expert_load is not None:
            self._expert_load.reset()

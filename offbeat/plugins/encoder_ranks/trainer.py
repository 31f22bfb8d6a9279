"""Base of the torch trainers of both sides of a grid: parameters and state of a whole model."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

import torch
from torch import Tensor

from offbeat.config.limits import encoder_tokens
from offbeat.plugins.encoder_ranks.exchange import ExchangingTrainer
from offbeat.plugins.encoder_ranks.loading import GridLoader
from offbeat.plugins.encoder_ranks.sides import Inventory
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.optimizer import STEPS
from offbeat.trainers.torch.split_step import TorchTrainer


class GridTrainer(ExchangingTrainer, TorchTrainer):
    """Trainer of one rank of a world whose ranks hold either the language model or the vision tower.

    ``GridLoader`` makes its model.
    """

    def _prepare(self) -> None:
        assert isinstance(self._loader, GridLoader)  # noqa: S101 -- the part that encoder ranks replace
        self._sides = self._loader
        self._join_grid(self._config)
        self._mesh = self._sides.mesh
        self._lane_group = None if self._mesh.tensor is None else self._mesh.tensor.get_group()
        self._max_tokens = encoder_tokens(self._config)

    def _hold(self) -> None:
        super()._hold()
        self._trains_tower = self.inventory.is_trained(Side.TOWER)

    @property
    def inventory(self) -> Inventory:
        """Return the tensors of the whole model that is trained."""
        return self._sides.inventory

    @property
    def parameters(self) -> int:
        return self.inventory.parameters

    @property
    def state_nbytes(self) -> int:
        """Estimate the bytes of both sides' state: the first rank looks for room for all of it."""
        return self.inventory.state_nbytes

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors to save; the numbers of updates are those of both sides, on all ranks."""
        state = super()._state()
        updates: list[float] = state[STEPS].tolist()
        own = dict(zip(self._optimizer.names, updates, strict=True))
        counts = [int(own.get(name, 0)) for name, _ in self.inventory.trained]
        return state | {STEPS: torch.tensor(self.peers.all_reduce_max(counts)).float()}

    def _own_steps(self, steps: Tensor) -> Tensor:
        own = [side is self._sides.side for _, side in self.inventory.trained]
        return steps[torch.tensor(own, dtype=torch.bool, device=steps.device)]

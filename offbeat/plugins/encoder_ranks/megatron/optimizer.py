"""Optimizer of a sharded tower, with its state in the form of the language ranks' optimizer."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.plugins.megatron.mapping import TOWER
from offbeat.plugins.megatron.optimizer import MASTER, MOMENTS, RankState
from offbeat.trainers.movement import UpdateResult
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch.optimizer import Optimizer
from offbeat.trainers.torch.rank_mesh import RankMesh
from offbeat.trainers.torch.sharding import own


class TowerOptimizer(RankState):
    """AdamW of this rank's trained shards of a tower; all ranks of the world make the same calls.

    It updates them in every step, also in one without pictures, as megatron-core's optimizer does on
    ranks that hold both sides: one number of updates is that of all weights, also on a rank that trains
    none of its own.
    """

    def __init__(
        self,
        tower: PreTrainedModel,
        shards: Mapping[str, Tensor],
        config: OptimizerConfig,
        dtype: torch.dtype,
        peers: Peers,
        mesh: RankMesh | None = None,
    ) -> None:
        """Start without moments.

        Args:
            tower: Sharded. Frozen parameters have no part in the state.
            shards: This rank's part of each of its parameters, in the memory that is updated.
            config: Rates and bounds.
            dtype: Of the weights that passes compute with: shards of 16-bit weights are masters.
            peers: All ranks of the world, over which the norm is taken.
            mesh: The axes over which the tower is sharded; None: data alone.
        """
        self._tower, self._optimizer = tower, Optimizer(tower, config, peers, mesh)
        names = [f"{TOWER}{name}" for name in self._optimizer.names]
        self._shards = {name: shards[name] for name in names}
        super().__init__(dtype)

    def step(self, denominator: float, learning_rate: float) -> UpdateResult:
        """Divide the summed gradients, clip them by the norm of both sides, update the weights."""
        for each in self._tower.parameters():
            if each.requires_grad and each.grad is None:
                each.grad = torch.zeros_like(each)
        result = self._optimizer.step(denominator, learning_rate)
        self.steps += result.applied
        return result

    def begin(self) -> None:
        """Prepare for the first microbatch of an update, without gradients."""
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients; weights and moments stay."""
        self._optimizer.drop_gradients()

    # --- the state ---------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        kinds = self._moments()
        if self._has_masters:
            kinds[MASTER] = dict(self._shards)
        return kinds

    @torch.no_grad()
    def load(self, kinds: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        names = self._optimizer.names if steps else ()
        self._optimizer.make_room({f"{kind}/{name}" for kind in MOMENTS for name in names})
        for kind, moments in self._moments().items():
            for name, each in moments.items():
                each.copy_(kinds[kind][name])
        if self._has_masters:
            for name, each in self._shards.items():
                each.copy_(kinds[MASTER][name])
        self._optimizer.filled(torch.full((len(self._optimizer.names),), float(steps)))
        self.steps = steps

    def reset(self) -> None:
        self._optimizer.reset()
        self.steps = 0

    def like(self, name: str) -> Tensor:
        return torch.zeros_like(self._shards[name])

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        """Return AdamW's moments by kind and by the parameter's name here; empty without any."""
        kinds = dict[str, dict[str, Tensor]]()
        for key, each in self._optimizer.moments().items():
            kind, _, name = key.partition("/")
            kinds.setdefault(kind, {})[f"{TOWER}{name}"] = own(each)
        return kinds

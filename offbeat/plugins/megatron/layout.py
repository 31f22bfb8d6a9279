"""Parallel layout of a model over the ranks of a world. Pure."""

from dataclasses import dataclass

from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.weight_sync.grid import ModelGrid


def make_grid(trainer: MegatronTrainerConfig) -> ModelGrid:
    """Return the parallel sizes of a recipe's trainer.

    Raises:
        LayoutRefused: They contradict each other.
    """
    return ModelGrid(
        tensor=trainer.tensor_parallel,
        pipeline=trainer.pipeline_parallel,
        context=trainer.context_parallel,
        data=trainer.data_parallel,
        expert=trainer.expert_parallel,
        expert_tensor=trainer.expert_tensor_parallel,
        stages=trainer.layers_per_stage or (),
    )


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Parallel sizes of a world, and one rank's place in it, in the library's order of ranks."""

    grid: ModelGrid
    rank: int = 0

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.grid.tensor

    @property
    def context_rank(self) -> int:
        return self.rank // self.grid.tensor % self.grid.context

    @property
    def data_rank(self) -> int:
        return self.rank // (self.grid.tensor * self.grid.context) % self.grid.data

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.grid.stage_ranks

    @property
    def expert_tensor_rank(self) -> int:
        return self.rank % self.grid.stage_ranks % self.grid.expert_tensor_ranks

    @property
    def expert_rank(self) -> int:
        within_stage = self.rank % self.grid.stage_ranks
        return within_stage // self.grid.expert_tensor_ranks % self.grid.expert

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.grid.pipeline - 1

    @property
    def is_replica_leader(self) -> bool:
        """Return whether this rank replies for its replica. The other ranks reply the same."""
        return self.tensor_rank == 0 and self.context_rank == 0 and self.is_last_stage

    @property
    def experts_fill_replicas(self) -> bool:
        """Return whether ranks that exchange tokens form whole replicas, or are within one.

        If not, shared replicas link different sets of such ranks.
        """
        replica = self.grid.tensor * self.grid.context
        exchanging = self.grid.expert * self.grid.expert_tensor_ranks
        return exchanging % replica == 0 or replica % exchanging == 0

"""How the ranks of a world share one model, and which share is one rank's. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The cut of a world, and one rank's place in it."""

    tensor: int = 1  # ranks that share every matrix
    pipeline: int = 1  # stages of layers
    expert: int = 1  # ranks that share the experts; they are data-parallel in all else
    data: int = 1  # replicas
    tensor_rank: int = 0
    pipeline_rank: int = 0
    expert_rank: int = 0
    data_rank: int = 0

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def is_replica_leader(self) -> bool:
        """The one rank of a replica whose replies count; its twins say the same."""
        return self.tensor_rank == 0 and self.is_last_stage

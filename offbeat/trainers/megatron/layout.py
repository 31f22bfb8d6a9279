"""Parallel layout of a model over the ranks of a world. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Parallel sizes of a world, and one rank's place in it."""

    tensor: int = 1  # ranks that share every matrix
    pipeline: int = 1  # stages of layers
    expert: int = 1  # ranks that share the experts; they are data-parallel in all else
    data: int = 1  # model replicas
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
        """Return whether this rank replies for its replica; the other ranks reply the same."""
        return self.tensor_rank == 0 and self.is_last_stage

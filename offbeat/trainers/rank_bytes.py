"""Bytes that a trainer rank holds throughout a step, by kind."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes that a rank holds throughout a step; activations come on top."""

    weights: int
    gradients: int
    optimizer: int  # masters and moments

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

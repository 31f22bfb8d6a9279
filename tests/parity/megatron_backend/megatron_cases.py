"""What tests ask of a world, and what they are told: knows neither torch nor the library."""

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from offbeat.messages.training import LossSpec, StepResult

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Cut:
    """A layout and what is trained under it."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    dtype: str = "float64"
    max_tokens: int = 150
    shared_prompt: bool = True
    overlap: bool = False
    optimizer: dict[str, Any] = field(default_factory=lambda: {"learning_rate": 1e-2})

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True)
class Step:
    """Groups with their advantages."""

    groups: list[dict[str, Any]]
    advantages: list[tuple[float, ...]]
    loss: LossSpec


@dataclass(frozen=True)
class Outcome:
    """What a step did, on one rank."""

    result: StepResult
    gradients: Arrays = field(repr=False)  # of the whole model, reduced, before clipping
    weights: Arrays = field(repr=False)
    in_step: bool  # this rank's share is what the others say it is

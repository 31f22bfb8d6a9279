"""What a step adds up over its microbatches, and how it is read at the end. Never normalised before.

Nothing is read from the device until the step ends: one transfer a step.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.algorithms.losses import LossSums, denominator
from offbeat.algorithms.metrics import Metric, Reduction
from offbeat.messages.training import LossSpec

_COMBINE = {Reduction.MIN: torch.minimum, Reduction.MAX: torch.maximum}


@dataclass(frozen=True, slots=True)
class StepMeans:
    """A finished step's numbers, each divided by what its kind says."""

    loss: float
    metrics: dict[str, float]


@dataclass(slots=True)
class StepSums:
    """The running sums of one step."""

    spec: LossSpec
    tokens: int = 0  # with loss mask set
    sequences: int = 0  # with a valid token
    chunks: int = 0
    compute_s: float = 0.0
    _loss: list[Tensor] = field(default_factory=list)
    _metrics: dict[str, Metric] = field(default_factory=dict)

    def add(self, sums: LossSums) -> None:
        """Take one microbatch's sums."""
        self._loss.append(sums.loss.detach().double())
        for name, (reduction, value) in sums.metrics.items():
            wide = value.double()
            if name in self._metrics:
                combine = _COMBINE.get(reduction, torch.add)
                wide = combine(self._metrics[name].value, wide)
            self._metrics[name] = Metric(reduction, wide)

    @property
    def denominator(self) -> float:
        """What loss and gradients are divided by."""
        return denominator(self.spec, float(self.tokens), float(self.sequences))

    def means(self) -> StepMeans:
        """The step's numbers. Only with at least one valid token."""
        names = list(self._metrics)
        stacked = torch.stack([sum(self._loss, start=self._loss[0].new_zeros(())),
                               *(self._metrics[name].value for name in names)])  # fmt: skip
        loss, *values = stacked.tolist()
        divisors = {Reduction.TOKENS: self.tokens, Reduction.SEQUENCES: self.sequences}
        metrics = {
            name: value / divisors.get(self._metrics[name].reduction, 1)
            for name, value in zip(names, values, strict=True)
        }
        return StepMeans(loss / self.denominator, metrics)

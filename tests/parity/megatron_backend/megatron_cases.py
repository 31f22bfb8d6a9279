"""What tests ask of a world, and what they are told: knows neither torch nor the library."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from parity_cases import Arrays, Outcome, Step

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.training import StepResult


@dataclass(frozen=True)
class JobStep(Step):
    """A step with its loss."""

    loss: LossSpec

    @classmethod
    def of(cls, step: Step, loss: LossSpec, groups: int | None = None) -> "JobStep":
        return cls(step.groups[:groups], step.advantages[:groups], loss)


@dataclass(frozen=True)
class Told:
    """What a step did, on one rank."""

    result: StepResult
    gradients: Arrays = field(repr=False)  # of the whole model, reduced, before clipping
    weights: Arrays = field(repr=False)
    in_step: bool  # this rank's share is what the others say it is


def told(outcome: Outcome, loss: LossSpec) -> Told:
    """The torch trainer's outcome in the terms of this one."""
    result, sums = outcome.result, outcome.gradients[1]
    divisor = result.tokens if loss.config.normalize == "tokens" else result.sequences
    gradients = {name: each / divisor for name, each in apart(sums).items()}
    return Told(result, gradients, apart(outcome.weights), in_step=True)


def apart(tensors: Mapping[str, Any]) -> Arrays:
    """transformers holds the experts of a layer in two tensors, megatron-core each by itself."""
    named = Arrays()
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith("mlp.experts"):
            named[name] = tensor
            continue
        for expert, each in enumerate(tensor):
            inside = f"{prefix}.{expert}"
            if kind == "down_proj":
                named[f"{inside}.down_proj.weight"] = each
            else:
                gate, up = np.split(each, 2)
                named |= {f"{inside}.gate_proj.weight": gate, f"{inside}.up_proj.weight": up}
    return named

"""Minibatches of a step with several optimizer steps: their groups, and the result of all of them."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tensordict import TensorDictBase

from offbeat.algorithms.divisors import AdvantageSums
from offbeat.config.loss_spec import LossSpec
from offbeat.trainers.backend import Advantages
from offbeat.trainers.step_sums import StepTotals
from offbeat.transfer_queue.tensordict_codec import stack_groups


class UpdateOutcome(NamedTuple):
    """One optimizer step; equal on all ranks."""

    totals: StepTotals
    grad_norm: float
    reason: str  # why the weights were not updated; empty if they were


@dataclass(slots=True)
class HeldGroups:
    """One rank's groups of an open step, by minibatch."""

    minibatches: int
    advantage_sums: AdvantageSums = field(default_factory=AdvantageSums)
    _groups: list[list[TensorDictBase]] = field(init=False)
    _advantages: list[list[Sequence[float]]] = field(init=False)

    def __post_init__(self) -> None:
        self._groups = [[] for _ in range(self.minibatches)]
        self._advantages = [[] for _ in range(self.minibatches)]

    def add(
        self,
        chunk: TensorDictBase,
        advantages: Advantages,
        minibatches: Sequence[int],
        sums: AdvantageSums,
    ) -> None:
        """Add the groups of a chunk, each to its minibatch, and the sums of their advantages."""
        self.advantage_sums = self.advantage_sums.plus(sums)
        for group, values, minibatch in zip(chunk.unbind(0), advantages, minibatches, strict=True):
            self._groups[minibatch].append(group)
            self._advantages[minibatch].append(values)

    def in_order(self, epochs: int) -> Iterator[tuple[TensorDictBase, Advantages]]:
        """Yield the minibatches in order, ``epochs`` times; one without groups is yielded too.

        Every rank has as many, so that ranks that compute together stay together.
        """
        for _ in range(epochs):
            yield from zip(map(stack_groups, self._groups), self._advantages, strict=True)


def combined_outcome(outcomes: Sequence[UpdateOutcome], loss: LossSpec) -> UpdateOutcome:
    """Return the optimizer steps of a step of the run as one, which is applied if any of them was.

    Loss and metrics are those of all applied steps together, each token counting alike; the norm is
    their mean. What compares trainer and engine by the age of tokens is of the first one alone: the
    weights of the others are no version that an engine has.
    """
    if len(outcomes) == 1:
        return outcomes[0]
    applied = [each for each in outcomes if not each.reason]
    counted = applied or list(outcomes)
    first = outcomes[0].totals
    ranks = [
        each if outcome.totals is first else replace(each, spread=None)
        for outcome in counted
        for each in outcome.totals.ranks
    ]
    reason = "" if applied else next(each.reason for each in outcomes)
    norm = statistics.fmean(each.grad_norm for each in counted)
    return UpdateOutcome(StepTotals(loss.config, ranks), norm, reason)


def update_metrics(outcomes: Sequence[UpdateOutcome]) -> dict[str, float]:
    """Return how many optimizer steps a step of the run took, where it was to take several.

    A minibatch without a group, as in a short last batch, counts as neither.
    """
    if len(outcomes) == 1:
        return {}
    refused = [
        each for each in outcomes if each.reason and each.totals.ranks and each.totals.tokens
    ]
    return {
        "train/optimizer_steps": sum(not each.reason for each in outcomes),
        "train/minibatches_refused": len(refused),
    }

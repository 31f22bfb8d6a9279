"""Sums of a step over its microbatches and ranks, normalised only when the step ends.

Nothing is read from the device until then. A step needs one transfer and one collective. The module
also holds the minibatches of a step with several optimizer steps, and combines their results.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import msgspec
import torch
from tensordict import TensorDictBase
from torch import Tensor

from offbeat.algorithms.diagnostics import SpreadRows, spread_metrics
from offbeat.algorithms.divisors import NOTHING, AdvantageSums, denominator
from offbeat.algorithms.losses import LossSums
from offbeat.algorithms.tokens import PartialMetric, PartialReduction
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import LossConfig
from offbeat.trainers.backend import Advantages
from offbeat.trainers.ranks.peers import Peers
from offbeat.transfer_queue.tensordict_codec import stack_groups

_Passes = tuple[int, float, Callable[[], float]]
"""Tokens, FLOPs and seconds of some passes."""

_COMBINE = {PartialReduction.MIN: torch.minimum, PartialReduction.MAX: torch.maximum}


@dataclass(frozen=True, slots=True)
class PassWork:
    """Work of the forward and backward passes of a rank, without padding, and its time."""

    tokens: int  # 0 if another rank of the replica counts them
    flops: float
    seconds: float
    replica: int  # replica of the tokens


@dataclass(frozen=True, slots=True)
class RankSums:
    """One rank's sums, as numbers."""

    tokens: int
    sequences: int
    loss: float
    metrics: dict[str, tuple[PartialReduction, float]]
    divisor: tuple[float, ...]  # sums that ``divisors.denominator`` reads
    spread: SpreadRows | None = None  # None: no staleness was known
    work: PassWork | None = None  # None: unknown


_RANK_SUMS: Final = msgspec.msgpack.Decoder[RankSums | None](RankSums | None)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums of a whole step over all ranks, with equal values on each rank."""

    config: LossConfig
    ranks: Sequence[RankSums]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.ranks)

    @property
    def sequences(self) -> int:
        return sum(each.sequences for each in self.ranks)

    @property
    def denominator(self) -> float:
        """Return the divisor of loss and gradients, or 0 without valid tokens."""
        return denominator(self.config, (each.divisor for each in self.ranks))

    def speed(self, peak: float | None) -> dict[str, float]:
        """Return metrics of device speed, mean over all ranks. Empty if the speed is unknown.

        ``peak`` is the maximum FLOP/s of a device, or None if unknown.
        """
        work = [each.work for each in self.ranks if each.work is not None]
        seconds = _device_seconds(work)
        if not seconds:
            return {}
        flop_s = sum(each.flops for each in work) / seconds
        tokens = sum(each.tokens for each in work)
        named = {"throughput/device_tokens_per_s": tokens / seconds}
        if flop_s:
            named["throughput/device_flop_per_s"] = flop_s
            if peak is not None:
                named["throughput/mfu"] = flop_s / peak
        return named

    @property
    def loss(self) -> float:
        """Return the normalised loss, or 0 if the denominator is 0."""
        return sum(each.loss for each in self.ranks) / (self.denominator or 1.0)

    @property
    def refusal(self) -> str:
        """Return why the optimizer must not apply this step, or an empty string if it may."""
        if not self.tokens:
            return "no valid tokens"
        if not self.denominator:
            return "a band dropped every valid token"
        return "" if math.isfinite(self.loss) else f"loss is {self.loss}"

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics, each reduced according to its kind. Omit those with divisor 0."""
        if not self.tokens:
            return {}
        kinds = {name: kind for each in self.ranks for name, (kind, _) in each.metrics.items()}
        if not self.denominator:
            kinds = {
                name: kind for name, kind in kinds.items() if kind is not PartialReduction.LOSS
            }
        spreads = [each.spread for each in self.ranks if each.spread is not None]
        return {name: self._metric(name, kind) for name, kind in kinds.items()} | spread_metrics(
            spreads
        )

    def _metric(self, name: str, kind: PartialReduction) -> float:
        values = [each.metrics[name][1] for each in self.ranks if name in each.metrics]
        match kind:
            case PartialReduction.MIN:
                return min(values)
            case PartialReduction.MAX:
                return max(values)
            case PartialReduction.TOKENS:
                return sum(values) / self.tokens
            case PartialReduction.SEQUENCES:
                return sum(values) / self.sequences
            case PartialReduction.LOSS:
                return sum(values) / self.denominator


def _device_seconds(work: Sequence[PassWork]) -> float:
    """Return the seconds of all devices. Each counts until its replica's last device is done."""
    seconds_by_replica = dict[int, list[float]]()
    for each in work:
        seconds_by_replica.setdefault(each.replica, []).append(each.seconds)
    return sum(len(each) * max(each) for each in seconds_by_replica.values())


@dataclass(slots=True)
class StepSums:
    """The running sums of one rank's step."""

    loss: LossSpec
    of_batch: AdvantageSums | None = None  # for a minibatch: sums of the rank's whole share
    replica: int = 0  # ranks of one replica compute the same tokens together
    tokens: int = 0  # with loss mask set
    sequences: int = 0  # with a valid token
    chunks: int = 0
    compute_s: float = 0.0
    _loss: list[Tensor] = field(default_factory=list[Tensor])
    _divisor: Tensor | None = None
    _metrics: dict[str, PartialMetric] = field(default_factory=dict[str, PartialMetric])
    _spread: Tensor | None = None
    _passes: list[_Passes] = field(default_factory=list[_Passes])

    def add(self, sums: LossSums) -> None:
        """Add the sums of one microbatch."""
        self._loss.append(sums.loss.detach().double())
        self._divisor = sums.divisor if self._divisor is None else self._divisor + sums.divisor
        for name, (reduction, value) in sums.metrics.items():
            wide = value.double()
            if name in self._metrics:
                combine = _COMBINE.get(reduction, torch.add)
                wide = combine(self._metrics[name].value, wide)
            self._metrics[name] = PartialMetric(reduction, wide)
        if sums.spread is not None:
            self._spread = sums.spread if self._spread is None else self._spread + sums.spread

    def count_chunk(self, tokens: int, sequences: int, compute_s: float) -> None:
        """Count a chunk, and the compute time of its microbatches, after these were added."""
        self.tokens, self.sequences = self.tokens + tokens, self.sequences + sequences
        self.chunks, self.compute_s = self.chunks + 1, self.compute_s + compute_s

    def add_work(self, tokens: int, flops: float, seconds: Callable[[], float]) -> None:
        """Add the replica's work in passes, without padding. The step's end calls ``seconds``."""
        self._passes.append((tokens, flops, seconds))

    def totals(self, peers: Peers, *, contributes: bool = True) -> StepTotals:
        """Return the sums over all contributing ranks. All ranks must call it together, once.

        For ranks that do not contribute, only the time of their passes counts.
        """
        gathered = peers.all_gather(self.own() if contributes else self._time_alone(), _RANK_SUMS)
        return StepTotals(self.loss.config, [each for each in gathered if each is not None])

    def own(self) -> RankSums:
        """Return the sums of this rank as numbers."""
        divisor = NOTHING if self._divisor is None else tuple(self._divisor.tolist())
        if self.of_batch is not None:
            divisor = (divisor[0], *self.of_batch)
        if self._divisor is None:
            return RankSums(
                self.tokens, self.sequences, 0.0, {}, divisor, spread=None, work=self._work()
            )
        loss = sum(self._loss, start=self._loss[0].new_zeros(()))
        loss, *values = torch.stack(
            [loss, *(metric.value for metric in self._metrics.values())]
        ).tolist()
        kinds = ((name, metric.reduction) for name, metric in self._metrics.items())
        metrics = {name: (kind, value) for (name, kind), value in zip(kinds, values, strict=True)}
        spread = None if self._spread is None else self._spread.tolist()
        return RankSums(self.tokens, self.sequences, loss, metrics, divisor, spread, self._work())

    def _time_alone(self) -> RankSums | None:
        work = self._work()
        if work is None:
            return None
        return RankSums(0, 0, 0.0, {}, NOTHING, work=replace(work, tokens=0, flops=0.0))

    def _work(self) -> PassWork | None:
        if not self._passes:
            return None
        tokens, flops, seconds = zip(*self._passes, strict=True)
        return PassWork(sum(tokens), sum(flops), sum(each() for each in seconds), self.replica)


class UpdateOutcome(NamedTuple):
    """One optimizer step, equal on all ranks."""

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
        """Yield the minibatches in order, ``epochs`` times, including minibatches without groups.

        Every rank yields the same number, so ranks that compute together stay in step.
        """
        for _ in range(epochs):
            yield from zip(map(stack_groups, self._groups), self._advantages, strict=True)


def combine_outcomes(outcomes: Sequence[UpdateOutcome], loss: LossSpec) -> UpdateOutcome:
    """Combine the outcomes of a step's optimizer steps. The result is applied if any of them was.

    Loss and metrics cover all applied optimizer steps, with each token weighted equally. The
    gradient norm is their mean. Metrics that compare trainer and engine by token age come only from
    the first optimizer step, because no engine has the weights of the later ones.
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
    """Return the numbers of applied optimizer steps and refused minibatches, if a step has several.

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

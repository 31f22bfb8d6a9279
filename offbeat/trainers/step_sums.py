"""Sums of a step over its microbatches and ranks, normalised only when the step ends.

Nothing is read from the device until then: one transfer per step, and one collective.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import torch
from torch import Tensor

from offbeat.algorithms.diagnostics import SpreadRows, spread_metrics
from offbeat.algorithms.divisors import NOTHING, AdvantageSums, denominator
from offbeat.algorithms.losses import LossSums
from offbeat.algorithms.metrics import PartialMetric, PartialReduction
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import LossConfig
from offbeat.trainers.ranks.peers import Peers

_COMBINE = {PartialReduction.MIN: torch.minimum, PartialReduction.MAX: torch.maximum}


@dataclass(frozen=True, slots=True)
class RankSums:
    """One rank's sums, as numbers."""

    tokens: int
    sequences: int
    loss: float
    metrics: dict[str, tuple[PartialReduction, float]]
    divisor: tuple[float, ...]  # the sums that ``divisors.denominator`` takes
    spread: SpreadRows | None = None  # None: no staleness was known
    work: tuple[int, float, float] | None = None  # tokens, FLOPs and seconds of its passes


_RANK_SUMS: Final = msgspec.msgpack.Decoder[RankSums | None](RankSums | None)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums of a whole step over all ranks; equal on each of them."""

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
        """Return the divisor of loss and gradients; 0 without valid tokens."""
        return denominator(self.config, (each.divisor for each in self.ranks))

    def speed(self, peak: float | None) -> dict[str, float]:
        """Return metrics of the speed of a device, mean over the ranks; empty if it is not known.

        ``peak``: FLOP/s of a device at most; None: not known.
        """
        work = [each.work for each in self.ranks if each.work is not None]
        seconds = sum(each for _, _, each in work)
        if not seconds:
            return {}
        flop_s = sum(each for _, each, _ in work) / seconds
        named = {"throughput/device_tokens_per_s": sum(each for each, _, _ in work) / seconds}
        if flop_s:
            named["throughput/device_flop_per_s"] = flop_s
            if peak is not None:
                named["throughput/mfu"] = flop_s / peak
        return named

    @property
    def loss(self) -> float:
        """Return the normalised loss; 0 if the denominator is 0."""
        return sum(each.loss for each in self.ranks) / (self.denominator or 1.0)

    @property
    def refusal(self) -> str:
        """Return why the optimizer must not apply this step; empty if it may."""
        if not self.tokens:
            return "no valid tokens"
        if not self.denominator:
            return "a band dropped every valid token"
        return "" if math.isfinite(self.loss) else f"loss is {self.loss}"

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics, reduced by their kinds; those with divisor 0 are left out."""
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


@dataclass(slots=True)
class StepSums:
    """The running sums of one rank's step."""

    loss: LossSpec
    of_batch: AdvantageSums | None = None  # of a minibatch: those of the rank's whole share
    tokens: int = 0  # with loss mask set
    sequences: int = 0  # with a valid token
    chunks: int = 0
    compute_s: float = 0.0
    work: tuple[int, float, float] | None = None  # tokens, FLOPs and seconds of its passes
    _loss: list[Tensor] = field(default_factory=list[Tensor])
    _divisor: Tensor | None = None
    _metrics: dict[str, PartialMetric] = field(default_factory=dict[str, PartialMetric])
    _spread: Tensor | None = None

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
        """Count a chunk whose microbatches were added, with the time that they took."""
        self.tokens, self.sequences = self.tokens + tokens, self.sequences + sequences
        self.chunks, self.compute_s = self.chunks + 1, self.compute_s + compute_s

    def add_work(self, tokens: int, flops: float, seconds: float) -> None:
        """Add what forward and backward passes computed, padding left out, and their time."""
        before = self.work or (0, 0.0, 0.0)
        self.work = (before[0] + tokens, before[1] + flops, before[2] + seconds)

    def totals(self, peers: Peers, *, contributes: bool = True) -> StepTotals:
        """Return the sums over all ranks that contribute; all ranks call it together, once."""
        gathered = peers.all_gather(self.own() if contributes else None, _RANK_SUMS)
        return StepTotals(self.loss.config, [each for each in gathered if each is not None])

    def own(self) -> RankSums:
        """Return the sums of this rank as numbers."""
        divisor = NOTHING if self._divisor is None else tuple(self._divisor.tolist())
        if self.of_batch is not None:
            divisor = (divisor[0], *self.of_batch)
        if self._divisor is None:
            return RankSums(
                self.tokens, self.sequences, 0.0, {}, divisor, spread=None, work=self.work
            )
        loss = sum(self._loss, start=self._loss[0].new_zeros(()))
        loss, *values = torch.stack(
            [loss, *(metric.value for metric in self._metrics.values())]
        ).tolist()
        kinds = ((name, metric.reduction) for name, metric in self._metrics.items())
        metrics = {name: (kind, value) for (name, kind), value in zip(kinds, values, strict=True)}
        spread = None if self._spread is None else self._spread.tolist()
        return RankSums(self.tokens, self.sequences, loss, metrics, divisor, spread, work=self.work)

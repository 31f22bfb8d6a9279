"""Losses to test, tokens to test them on, and the same numbers written as plain loops."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from offbeat.algorithms.losses import LossTokens
from offbeat.config.sections.loss import (
    CispoLossConfig,
    ClippedPgLossConfig,
    GspoLossConfig,
    LossConfig,
    PessimisticLossConfig,
    SftLossConfig,
)

SPECS = {
    "ppo": ClippedPgLossConfig(clip_low=0.1, clip_high=0.3),
    "dapo": ClippedPgLossConfig(clip_high=0.28, normalize="tokens"),
    "grpo": ClippedPgLossConfig(normalize="sequences", kl_coef=0.2, kl_kind="k2"),
    "dual_clip": ClippedPgLossConfig(dual_clip=1.6, clip_high=0.1),
    "gspo": GspoLossConfig(clip_low=0.03, clip_high=0.04, normalize="sequences"),
    "gspo_tokens": GspoLossConfig(clip_low=0.2, dual_clip=1.5, kl_coef=0.1),
    "cispo": CispoLossConfig(clip_low=0.3, clip_high=0.1),
    "cispo_sequences": CispoLossConfig(clip_low=1.0, clip_high=4.0, normalize="sequences"),
    "sft": SftLossConfig(normalize="sequences"),
    "tis": ClippedPgLossConfig(old_logprobs="policy", tis_cap=1.1, kl_coef=0.3, kl_kind="k1"),
    "icepop": ClippedPgLossConfig(old_logprobs="policy", icepop_band=(0.85, 1.2)),
    "icepop_capped": ClippedPgLossConfig(
        old_logprobs="policy", icepop_band=(0.8, 1.4), tis_cap=1.05
    ),
    "geometric": ClippedPgLossConfig(old_logprobs="policy", sequence_band=(0.93, 1.05)),
    "product": ClippedPgLossConfig(
        old_logprobs="policy", sequence_band=(0.5, 1.3), sequence_statistic="product", tis_cap=2.0
    ),
    "current": ClippedPgLossConfig(
        old_logprobs="current", icepop_band=(0.7, 1.5), normalize="sequences"
    ),
    "cispo_masked": CispoLossConfig(old_logprobs="policy", sequence_band=(0.9, 1.1)),
    "constant": ClippedPgLossConfig(normalize="constant", constant_tokens=11, kl_coef=0.1),
    "mis": ClippedPgLossConfig(
        old_logprobs="policy",
        sequence_band=(0.0, 1.1),
        sequence_statistic="product",
        sequence_weights=True,
        count_dropped=False,
        kl_coef=0.2,
    ),
    "icepop_kept": ClippedPgLossConfig(
        old_logprobs="policy", icepop_band=(0.85, 1.2), count_dropped=False, normalize="sequences"
    ),
    "gspo_kept": GspoLossConfig(
        old_logprobs="policy",
        sequence_band=(0.9, 1.1),
        icepop_band=(0.7, 1.3),
        count_dropped=False,
        normalize="constant",
        constant_tokens=3,
    ),
}
"""Every surrogate, every correction, both normalisations, every KL."""


def tokens_of(seed: int, lengths: Sequence[int] = (3, 1, 5, 2, 7), **changes: Any) -> LossTokens:
    """Random tokens in float64, one advantage a sequence; the last sequence has no valid token."""
    rng, total = torch.Generator().manual_seed(seed), sum(lengths)

    def normal(scale: float, size: int = total) -> Tensor:
        return scale * torch.randn(size, generator=rng, dtype=torch.float64)

    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    generation = -2 + normal(0.5)
    mask = torch.rand(total, generator=rng) > 0.3
    mask[0], mask[-lengths[-1] :] = True, False
    made = LossTokens(
        logprobs_N=(generation + normal(0.3)).requires_grad_(),
        old_N=generation + normal(0.2),
        generation_N=generation,
        reference_N=generation + normal(0.5),
        advantages_N=normal(1.0, len(lengths))[sequence],
        mask_N=mask,
        sequence_N=sequence,
        sequences=len(lengths),
        staleness_N=torch.randint(0, 9, (total,), generator=rng),
    )
    return replace(made, **changes)


def picked(tokens: LossTokens, index: Tensor, sequence: Tensor, sequences: int) -> LossTokens:
    """Some of the tokens, or all in another order, under other sequence numbers."""
    assert tokens.reference_N is not None and tokens.staleness_N is not None
    assert tokens.generation_N is not None
    return LossTokens(
        logprobs_N=tokens.logprobs_N.detach()[index].requires_grad_(),
        old_N=tokens.old_N[index],
        generation_N=tokens.generation_N[index],
        reference_N=tokens.reference_N[index],
        advantages_N=tokens.advantages_N[index],
        mask_N=tokens.mask_N[index],
        sequence_N=sequence,
        sequences=sequences,
        staleness_N=tokens.staleness_N[index],
    )


@dataclass
class Expected:
    """What a loss should come to."""

    loss: float = 0.0
    gradient: list[float] = field(default_factory=list)  # of each token's logprob
    at_bound: Counter[str] = field(default_factory=Counter)  # tokens by the bound that has them
    weights: list[float] = field(default_factory=list)  # of valid tokens
    dropped_sequences: int = 0
    units: float = 0.0  # what the loss of a step like this is divided by
    samples: int = 0
    squares: float = 0.0


@dataclass
class Numbers:
    """The columns as lists."""

    logprob: list[float]
    old: list[float]
    generation: list[float]
    reference: list[float]
    advantage: list[float]


def keys_of(config: LossConfig) -> PessimisticLossConfig:
    """The keys of every loss, at their defaults where this one has no such key."""
    return PessimisticLossConfig.model_validate(config.model_dump(exclude={"name"}))


def expected(tokens: LossTokens, config: LossConfig) -> Expected:
    """Sequence after sequence, token after token. Log-ratios are taken to be small."""
    assert tokens.reference_N is not None and tokens.generation_N is not None
    keys = keys_of(config)
    logprob: list[float] = tokens.logprobs_N.detach().tolist()
    numbers = Numbers(
        logprob,
        logprob if keys.old_logprobs == "current" else tokens.old_N.tolist(),
        tokens.generation_N.tolist(),
        tokens.reference_N.tolist(),
        tokens.advantages_N.tolist(),
    )
    made = Expected(gradient=[0.0] * len(logprob))
    for s in range(tokens.sequences):
        mine = (tokens.sequence_N == s) & tokens.mask_N
        own = [i for i in range(len(logprob)) if bool(mine[i])]
        if own:
            _add_sequence(made, numbers, own, keys, config.name)
    return made


def _add_sequence(
    made: Expected, numbers: Numbers, own: list[int], keys: PessimisticLossConfig, name: str
) -> None:
    keep = _kept(numbers, own, keys)
    weights = {i: keep * _weight(math.exp(_gap(numbers, i)), keys) for i in own}
    if keys.sequence_weights:
        weights = {i: w * math.exp(sum(_gap(numbers, j) for j in own)) for i, w in weights.items()}
    counted = [i for i in own if keys.count_dropped or weights[i]]
    share = 1 / len(counted) if keys.normalize == "sequences" and counted else 1.0
    made.dropped_sequences += not keep
    made.samples += 1
    made.squares += numbers.advantage[own[0]] ** 2
    if counted:
        each = {"tokens": len(counted), "sequences": 1, "constant": keys.constant_tokens}
        made.units += each[keys.normalize] or 0
    for i in own:
        made.weights.append(weights[i])
        value, pulls, bound = _surrogate(numbers, own, i, keys, name)
        made.at_bound[bound] += 1
        made.loss -= share * weights[i] * value
        for j, slope in pulls.items():
            made.gradient[j] -= share * weights[i] * slope
        if keys.kl_coef and i in counted:
            kl, slope = _kl(numbers.reference[i] - numbers.logprob[i], keys.kl_kind)
            made.loss += share * keys.kl_coef * kl
            made.gradient[i] += share * keys.kl_coef * slope


def _gap(numbers: Numbers, i: int) -> float:
    return numbers.old[i] - numbers.generation[i]


def _kept(numbers: Numbers, own: list[int], keys: PessimisticLossConfig) -> bool:
    if keys.sequence_band is None:
        return True
    gap = sum(numbers.old[i] - numbers.generation[i] for i in own)
    k = math.exp(gap if keys.sequence_statistic == "product" else gap / len(own))
    return keys.sequence_band[0] <= k <= keys.sequence_band[1]


def _weight(k: float, keys: PessimisticLossConfig) -> float:
    if keys.icepop_band is not None and not keys.icepop_band[0] <= k <= keys.icepop_band[1]:
        return 0.0
    if keys.tis_cap is not None:
        return min(k, keys.tis_cap)
    return 1.0 if keys.icepop_band is None else k


def _surrogate(
    numbers: Numbers, own: list[int], i: int, keys: PessimisticLossConfig, name: str
) -> tuple[float, dict[int, float], str]:
    """What is maximised at token i; its slope in each logprob; the bound that holds it."""
    a, low, high = numbers.advantage[i], 1 - keys.clip_low, 1 + keys.clip_high
    over = own if name == "gspo" else [i]
    r = math.exp(sum(numbers.logprob[j] - numbers.old[j] for j in over) / len(over))
    if name == "sft":
        return numbers.logprob[i], {i: 1.0}, ""
    if name == "cispo":
        bounded = max(low, min(high, r))
        bound = "low" if r < low else "high" if r > high else ""
        return bounded * a * numbers.logprob[i], {i: bounded * a}, bound
    if a < 0 and r < low:
        return low * a, {}, "low"
    if a > 0 and r > high:
        return high * a, {}, "high"
    if a < 0 and keys.dual_clip is not None and r > keys.dual_clip:
        return keys.dual_clip * a, {}, "dual"
    return r * a, {j: r * a / len(over) for j in over}, ""


def _kl(d: float, kind: str) -> tuple[float, float]:
    """Value, and slope in the logprob."""
    kinds = {
        "k1": (-d, 1.0),
        "k2": (d * d / 2, -d),
        "k3": (math.exp(d) - d - 1, 1 - math.exp(d)),
    }
    return kinds[kind]

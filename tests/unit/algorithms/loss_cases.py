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
    CustomLossConfig,
    GspoLossConfig,
    LossConfig,
    PessimisticLossConfig,
    PolicyGradientLossConfig,
    SapoLossConfig,
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
    "sft": SftLossConfig(normalize="sequences", entropy_coef=0.1),
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
    "sapo": SapoLossConfig(
        tau_positive=0.7, normalize="sequences", kl_coef=0.4, kl_kind="k1", kl_clamp=0.3
    ),
    "sapo_capped": SapoLossConfig(old_logprobs="policy", tis_cap=1.05, off_policy_delta=0.02),
    "sequence_cap": ClippedPgLossConfig(
        old_logprobs="policy", sequence_cap=1.1, kl_coef=0.4, kl_kind="k1", kl_gradient="unbiased"
    ),
    "sequence_cap_band": CispoLossConfig(
        old_logprobs="policy", sequence_cap=1.2, sequence_band=(0.92, 1.1), normalize="sequences"
    ),
    "off_policy_kept": GspoLossConfig(
        off_policy_delta=0.01,
        count_dropped=False,
        kl_coef=0.1,
        kl_gradient="unbiased",
        entropy_coef=0.3,
        kl_reward_coef=0.2,
    ),
    "unbiased_current": CispoLossConfig(
        old_logprobs="current",
        kl_coef=0.4,
        kl_gradient="unbiased",
        kl_clamp=0.2,
        kl_reward_coef=0.5,
    ),
}
"""Every surrogate, every correction, both normalisations, every KL."""


def clipped(tokens: LossTokens, options: dict[str, Any]) -> Tensor:
    """``clipped_pg`` as a user would write it."""
    ratio_N = (tokens.logprobs_N - tokens.old_N).exp()
    bounded_N = ratio_N.clamp(1 - options["clip_low"], 1 + options["clip_high"])
    loss_N = -torch.minimum(ratio_N * tokens.advantages_N, bounded_N * tokens.advantages_N)
    if options["dual_clip"] is not None:
        most_N = -options["dual_clip"] * tokens.advantages_N
        is_bounded_N = tokens.advantages_N < 0
        loss_N = torch.where(is_bounded_N, torch.minimum(loss_N, most_N), loss_N)
    return loss_N


def as_custom(config: ClippedPgLossConfig) -> CustomLossConfig:
    """The same recipe with a function in the place of the built-in surrogate."""
    common = config.model_dump(include=set(PolicyGradientLossConfig.model_fields))
    own = config.model_dump(include={"clip_low", "clip_high", "dual_clip"})
    return CustomLossConfig(target="mine:clipped", options=own, **common)


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
        entropy_N=torch.rand(total, generator=rng, dtype=torch.float64).requires_grad_(),
    )
    return replace(made, **changes)


def picked(tokens: LossTokens, index: Tensor, sequence: Tensor, sequences: int) -> LossTokens:
    """Some of the tokens, or all in another order, under other sequence numbers."""
    assert tokens.reference_N is not None and tokens.staleness_N is not None
    assert tokens.generation_N is not None and tokens.entropy_N is not None
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
        entropy_N=tokens.entropy_N.detach()[index].requires_grad_(),
    )


@dataclass
class Expected:
    """What a loss should come to."""

    loss: float = 0.0
    gradient: list[float] = field(default_factory=list)  # of each token's logprob
    entropy: float = 0.0  # summed over valid tokens
    entropy_gradient: list[float] = field(default_factory=list)  # of each token's entropy
    at_bound: Counter[str] = field(default_factory=Counter)  # tokens by the bound that has them
    weights: list[float] = field(default_factory=list)  # of valid tokens
    dropped_sequences: int = 0  # by sequence_band
    off_policy_sequences: int = 0  # by off_policy_delta
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
    entropy: list[float]


class EveryKey(PessimisticLossConfig):
    """The keys of every loss."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05


def keys_of(config: LossConfig) -> EveryKey:
    """The keys of every loss, at their defaults where this one has no such key."""
    return EveryKey.model_validate(config.model_dump(exclude={"name"}))


def expected(tokens: LossTokens, config: LossConfig) -> Expected:
    """Sequence after sequence, token after token. Log-ratios are taken to be small."""
    assert tokens.reference_N is not None and tokens.generation_N is not None
    assert tokens.entropy_N is not None
    keys = keys_of(config)
    logprob: list[float] = tokens.logprobs_N.detach().tolist()
    numbers = Numbers(
        logprob,
        logprob if keys.old_logprobs == "current" else tokens.old_N.tolist(),
        tokens.generation_N.tolist(),
        tokens.reference_N.tolist(),
        tokens.advantages_N.tolist(),
        tokens.entropy_N.detach().tolist(),
    )
    for i, own in enumerate(numbers.advantage):
        kl = numbers.old[i] - numbers.reference[i]
        numbers.advantage[i] = own - keys.kl_reward_coef * kl
    made = Expected(gradient=[0.0] * len(logprob), entropy_gradient=[0.0] * len(logprob))
    for s in range(tokens.sequences):
        mine = (tokens.sequence_N == s) & tokens.mask_N
        own = [i for i in range(len(logprob)) if bool(mine[i])]
        if own:
            _add_sequence(made, numbers, own, keys, config.name)
    return made


def _add_sequence(
    made: Expected, numbers: Numbers, own: list[int], keys: EveryKey, name: str
) -> None:
    keep, on_policy = _kept(numbers, own, keys), _on_policy(numbers, own, keys)
    weights = {i: keep * on_policy * _weight(math.exp(_gap(numbers, i)), keys) for i in own}
    product = math.exp(sum(_gap(numbers, j) for j in own))
    if keys.sequence_weights:
        weights = {i: w * product for i, w in weights.items()}
    if keys.sequence_cap is not None:
        weights = {i: w * min(product, keys.sequence_cap) for i, w in weights.items()}
    counted = [i for i in own if keys.count_dropped or weights[i]]
    share = 1 / len(counted) if keys.normalize == "sequences" and counted else 1.0
    made.dropped_sequences += not keep
    made.off_policy_sequences += not on_policy
    made.samples += 1
    made.squares += (sum(numbers.advantage[i] for i in own) / len(own)) ** 2
    if counted:
        each = {"tokens": len(counted), "sequences": 1, "constant": keys.constant_tokens}
        made.units += each[keys.normalize] or 0
    for i in own:
        made.weights.append(weights[i])
        made.entropy += numbers.entropy[i]
        value, pulls, bound = _surrogate(numbers, own, i, keys, name)
        made.at_bound[bound] += 1
        made.loss -= share * weights[i] * value
        for j, slope in pulls.items():
            made.gradient[j] -= share * weights[i] * slope
        if i in counted:
            made.loss -= share * keys.entropy_coef * numbers.entropy[i]
            made.entropy_gradient[i] -= share * keys.entropy_coef
        if keys.kl_coef and i in counted:
            kl, slope = _kl(numbers, i, keys)
            made.loss += share * keys.kl_coef * kl
            made.gradient[i] += share * keys.kl_coef * slope


def _gap(numbers: Numbers, i: int) -> float:
    return numbers.old[i] - numbers.generation[i]


def _kept(numbers: Numbers, own: list[int], keys: EveryKey) -> bool:
    if keys.sequence_band is None:
        return True
    gap = sum(numbers.old[i] - numbers.generation[i] for i in own)
    k = math.exp(gap if keys.sequence_statistic == "product" else gap / len(own))
    return keys.sequence_band[0] <= k <= keys.sequence_band[1]


def _on_policy(numbers: Numbers, own: list[int], keys: EveryKey) -> bool:
    """Whether the sequence is rewarded, or still about as likely as when it was drawn."""
    drift = sum(numbers.generation[i] - numbers.logprob[i] for i in own) / len(own)
    delta = keys.off_policy_delta
    return delta is None or sum(numbers.advantage[i] for i in own) >= 0 or drift <= delta


def _weight(k: float, keys: EveryKey) -> float:
    if keys.icepop_band is not None and not keys.icepop_band[0] <= k <= keys.icepop_band[1]:
        return 0.0
    if keys.tis_cap is not None:
        return min(k, keys.tis_cap)
    return 1.0 if keys.icepop_band is None else k


def _surrogate(
    numbers: Numbers, own: list[int], i: int, keys: EveryKey, name: str
) -> tuple[float, dict[int, float], str]:
    """What is maximised at token i; its slope in each logprob; the bound that holds it."""
    a, low, high = numbers.advantage[i], 1 - keys.clip_low, 1 + keys.clip_high
    over = own if name == "gspo" else [i]
    r = math.exp(sum(numbers.logprob[j] - numbers.old[j] for j in over) / len(over))
    if name == "sft":
        return numbers.logprob[i], {i: 1.0}, ""
    if name == "sapo":
        return *_gated(r, a, i, keys), ""
    if name == "cispo":
        bounded = max(low, min(high, r))
        bound = "low" if r < low else "high" if r > high else ""
        return bounded * a * numbers.logprob[i], {i: bounded * a}, bound
    dual = math.inf if keys.dual_clip is None else keys.dual_clip
    holds = {"low": (a < 0 and r < low, low), "high": (a > 0 and r > high, high)}
    holds["dual"] = (a < 0 and r > dual, dual)
    for bound, (is_held, at) in holds.items():
        if is_held:
            return at * a, {}, bound
    return r * a, {j: r * a / len(over) for j in over}, ""


def _gated(r: float, a: float, i: int, keys: EveryKey) -> tuple[float, dict[int, float]]:
    tau = keys.tau_positive if a > 0 else keys.tau_negative
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return 4 / tau * gate * a, {i: 4 * gate * (1 - gate) * r * a}


def _kl(numbers: Numbers, i: int, keys: EveryKey) -> tuple[float, float]:
    """Value, and slope in the logprob."""
    d = numbers.reference[i] - numbers.logprob[i]
    kinds = {
        "k1": (-d, 1.0),
        "k2": (d * d / 2, -d),
        "k3": (math.exp(d) - d - 1, 1 - math.exp(d)),
    }
    value, slope = kinds[keys.kl_kind]
    if keys.kl_gradient == "unbiased":
        r = math.exp(numbers.logprob[i] - numbers.old[i])
        value, slope = r * value, r * (value + slope)
    if keys.kl_clamp is not None and abs(value) > keys.kl_clamp:
        return math.copysign(keys.kl_clamp, value), 0.0
    return value, slope

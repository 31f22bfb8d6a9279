import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.algorithms.losses import LOSSES, LossTokens, kl_penalty
from offbeat.algorithms.metrics import Reduction
from offbeat.messages.training import LossSpec

clipped_pg = LOSSES["clipped_pg"]
SPECS = [
    LossSpec(),
    LossSpec(clip_low=0.1, clip_high=0.3, normalize="sequences"),
    LossSpec(old_logprobs="policy", tis_cap=1.5, kl_coef=0.2, kl_kind="k3"),
    LossSpec(kl_coef=0.3, kl_kind="k1", normalize="sequences", tis_cap=0.9),
]


def tokens_of(seed: int, lengths: tuple[int, ...] = (3, 1, 5, 2), **changes: Any) -> LossTokens:
    """Random tokens in float64; the last sequence has no valid token."""
    rng, total = torch.Generator().manual_seed(seed), sum(lengths)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=rng, dtype=torch.float64)

    generation = -2 + normal(0.5)
    mask = torch.rand(total, generator=rng) > 0.3
    mask[0], mask[-lengths[-1] :] = True, False
    made = LossTokens(
        logprobs_N=(generation + normal(0.3)).requires_grad_(),
        old_N=generation + normal(0.2),
        generation_N=generation,
        reference_N=generation + normal(0.5),
        advantages_N=normal(1.0),
        mask_N=mask,
        sequence_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        sequences=len(lengths),
    )
    return replace(made, **changes)


def reference(tokens: LossTokens, spec: LossSpec) -> dict[str, float]:
    """The loss again, one token after another, in plain Python."""
    assert tokens.reference_N is not None
    terms: dict[int, list[float]] = {}
    seen: dict[str, list[float]] = {name: [] for name in ("ratio", "low", "high", "tis", "gap")}
    seen |= {"kl": [], "behaviour": []}
    for i in range(len(tokens.mask_N)):
        if not tokens.mask_N[i]:
            continue
        logprob, old = float(tokens.logprobs_N[i].detach()), float(tokens.old_N[i])
        generation, advantage = float(tokens.generation_N[i]), float(tokens.advantages_N[i])
        ratio = math.exp(logprob - old)
        bounded = max(1 - spec.clip_low, min(1 + spec.clip_high, ratio))
        term = -min(ratio * advantage, bounded * advantage)
        if spec.tis_cap is not None:
            seen["tis"].append(min(math.exp(old - generation), spec.tis_cap))
            term *= seen["tis"][-1]
        d = float(tokens.reference_N[i]) - logprob
        kl = -d if spec.kl_kind == "k1" else math.exp(d) - d - 1
        term += spec.kl_coef * kl
        behaviour = logprob - generation
        seen["kl"].append(kl)
        seen["behaviour"].append(math.exp(behaviour) - behaviour - 1)
        seen["ratio"].append(ratio)
        seen["low"].append(float(advantage < 0 and ratio < 1 - spec.clip_low))
        seen["high"].append(float(advantage > 0 and ratio > 1 + spec.clip_high))
        seen["gap"].append(abs(behaviour))
        terms.setdefault(int(tokens.sequence_N[i]), []).append(term)
    per_token = sum(sum(each) for each in terms.values())
    per_sequence = sum(sum(each) / len(each) for each in terms.values())
    return {
        "loss": per_token if spec.normalize == "tokens" else per_sequence,
        "tokens": sum(map(len, terms.values())),
        "sequences": len(terms),
        "train/ratio_mean": sum(seen["ratio"]),
        "train/ratio_min": min(seen["ratio"]),
        "train/ratio_max": max(seen["ratio"]),
        "train/clip_fraction_low": sum(seen["low"]),
        "train/clip_fraction_high": sum(seen["high"]),
        "off_policy/logprob_gap_mean": sum(seen["gap"]),
        "off_policy/logprob_gap_max": max(seen["gap"]),
        "off_policy/behaviour_kl": sum(seen["behaviour"]),
        "train/tis_weight_mean": sum(seen["tis"]),
        "train/kl_reference": sum(seen["kl"]),
    }


@pytest.mark.parametrize("spec", SPECS)
@given(seed=st.integers(0, 10_000))
def test_sums_and_metrics_are_those_of_the_formula(spec: LossSpec, seed: int) -> None:
    tokens = tokens_of(seed)
    got, want = clipped_pg(tokens, spec), reference(tokens, spec)
    assert got.loss.item() == pytest.approx(want["loss"], rel=1e-11, abs=1e-11)
    assert (got.tokens.item(), got.sequences.item()) == (want["tokens"], want["sequences"])
    for name, metric in got.metrics.items():
        if name != "train/policy_loss":
            assert float(metric.value) == pytest.approx(want[name], rel=1e-11, abs=1e-11), name
    assert ("train/tis_weight_mean" in got.metrics) == (spec.tis_cap is not None)
    assert ("train/kl_reference" in got.metrics) == (spec.kl_coef > 0)


@pytest.mark.parametrize("spec", SPECS)
def test_the_gradient_is_that_of_finite_differences(spec: LossSpec) -> None:
    tokens = tokens_of(3)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return clipped_pg(replace(tokens, logprobs_N=logprobs), spec).loss

    assert torch.autograd.gradcheck(loss, (tokens.logprobs_N,))


@pytest.mark.parametrize("spec", SPECS)
@given(seed=st.integers(0, 1000), poison=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
def test_what_is_masked_leaks_neither_forward_nor_backward(
    spec: LossSpec, seed: int, poison: float
) -> None:
    clean = tokens_of(seed)

    def poisoned(values: torch.Tensor) -> torch.Tensor:
        return torch.where(clean.mask_N, values.detach(), poison)

    assert clean.reference_N is not None
    bad = replace(
        clean,
        logprobs_N=poisoned(clean.logprobs_N).requires_grad_(),
        old_N=poisoned(clean.old_N),
        generation_N=poisoned(clean.generation_N),
        reference_N=poisoned(clean.reference_N),
        advantages_N=poisoned(clean.advantages_N),
    )
    sums = [clipped_pg(each, spec) for each in (clean, bad)]
    for each in sums:
        each.loss.backward()
    assert sums[0].loss.item() == sums[1].loss.item()
    assert clean.logprobs_N.grad is not None
    assert bad.logprobs_N.grad is not None
    assert torch.equal(clean.logprobs_N.grad, bad.logprobs_N.grad)
    assert not bad.logprobs_N.grad[~bad.mask_N].any()
    for name, metric in sums[0].metrics.items():
        assert float(metric.value) == float(sums[1].metrics[name].value)


@given(gap=st.floats(-1e4, 1e4), advantage=st.sampled_from([-1.0, 1.0]))
def test_extreme_log_ratios_of_valid_tokens_stay_finite(gap: float, advantage: float) -> None:
    tokens = tokens_of(0)
    wild = replace(
        tokens,
        logprobs_N=(tokens.old_N + gap).float().requires_grad_(),
        advantages_N=torch.full_like(tokens.old_N, advantage),
    )
    spec = LossSpec(kl_coef=0.1, tis_cap=2.0)
    sums = clipped_pg(wild, spec)
    sums.loss.backward()
    assert wild.logprobs_N.grad is not None
    assert sums.loss.isfinite()
    assert wild.logprobs_N.grad.isfinite().all()


def test_a_nan_at_a_valid_token_is_not_hidden() -> None:
    tokens = tokens_of(0)
    generation = tokens.old_N.clone()
    generation[0] = math.nan
    assert clipped_pg(replace(tokens, old_N=generation), LossSpec()).loss.isnan()


def test_the_importance_weight_carries_no_gradient() -> None:
    tokens = tokens_of(0)
    old = tokens.old_N.clone().requires_grad_()
    sums = clipped_pg(replace(tokens, old_N=old.detach()), SPECS[2])
    sums.loss.backward()
    assert old.grad is None


def test_a_clipped_token_pulls_no_further() -> None:
    def gradient(gap: float, advantage: float) -> float:
        logprob = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
        zero, one = torch.zeros(1, dtype=torch.float64), torch.tensor([True])
        tokens = LossTokens(
            logprob, zero, zero, None, zero + advantage, one, torch.zeros(1, dtype=torch.int64), 1
        )
        clipped_pg(tokens, LossSpec(clip_low=0.2, clip_high=0.5)).loss.backward()
        assert logprob.grad is not None
        return float(logprob.grad)

    assert gradient(math.log(1.6), 1.0) == 0
    assert gradient(math.log(1.4), 1.0) == pytest.approx(-1.4)
    assert gradient(math.log(0.7), -1.0) == 0
    assert gradient(math.log(0.7), 1.0) == pytest.approx(-0.7)
    assert gradient(math.log(1.6), -1.0) == pytest.approx(1.6)


def test_k3_is_never_negative_and_both_estimate_the_same_divergence() -> None:
    rng = torch.Generator().manual_seed(0)
    policy = torch.log_softmax(torch.randn(6, generator=rng, dtype=torch.float64), 0)
    other = torch.log_softmax(torch.randn(6, generator=rng, dtype=torch.float64), 0)
    exact = float((policy.exp() * (policy - other)).sum())
    for kind in ("k1", "k3"):
        estimate = (policy.exp() * kl_penalty(policy, other, kind)).sum()
        assert float(estimate) == pytest.approx(exact)
    assert (kl_penalty(policy, other, "k3") >= 0).all()


def test_the_policy_loss_is_divided_like_the_gradient() -> None:
    for spec in SPECS:
        kind = clipped_pg(tokens_of(0), spec).metrics["train/policy_loss"].reduction
        assert kind is Reduction.LOSS

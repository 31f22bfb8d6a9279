"""What a loss tells beside its value: against the formulas, one token after another."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import tokens_of

from offbeat.algorithms.kl import kl_penalty
from offbeat.algorithms.losses import LossTokens, clipped_pg
from offbeat.algorithms.tokens import PartialReduction
from offbeat.config.sections.loss import ClippedPgLossConfig

SPECS = [
    ClippedPgLossConfig(),
    ClippedPgLossConfig(clip_low=0.1, clip_high=0.3, normalize="sequences"),
    ClippedPgLossConfig(old_logprobs="policy", tis_cap=1.5, kl_coef=0.2, kl_kind="k3"),
    ClippedPgLossConfig(kl_coef=0.3, kl_kind="k1", normalize="sequences", tis_cap=0.9),
]


def reference(tokens: LossTokens, config: ClippedPgLossConfig) -> dict[str, float]:
    assert tokens.reference_N is not None and tokens.generation_N is not None
    sums = dict[str, float]()
    ratios, gaps = list[float](), list[float]()

    def add(name: str, value: float) -> None:
        sums[name] = sums.get(name, 0.0) + value

    for i in torch.nonzero(tokens.mask_N)[:, 0].tolist():
        logprob, old = float(tokens.logprobs_N[i].detach()), float(tokens.old_N[i])
        generation, advantage = float(tokens.generation_N[i]), float(tokens.advantages_N[i])
        ratio, gap = math.exp(logprob - old), logprob - generation
        d = float(tokens.reference_N[i]) - logprob
        ratios.append(ratio)
        gaps.append(abs(gap))
        add("train/clip_fraction_low", advantage < 0 and ratio < 1 - config.clip_low)
        add("train/clip_fraction_high", advantage > 0 and ratio > 1 + config.clip_high)
        add("off_policy/behaviour_kl", math.exp(gap) - gap - 1)
        if config.tis_cap is not None:
            add("train/tis_weight_mean", min(math.exp(old - generation), config.tis_cap))
        if config.kl_coef:
            add("train/kl_reference", -d if config.kl_kind == "k1" else math.exp(d) - d - 1)
    return sums | {
        "train/ratio_mean": sum(ratios),
        "train/ratio_min": min(ratios),
        "train/ratio_max": max(ratios),
        "off_policy/logprob_gap_mean": sum(gaps),
        "off_policy/logprob_gap_max": max(gaps),
    }


@pytest.mark.parametrize("config", SPECS)
@given(seed=st.integers(0, 10_000))
def test_metrics_are_those_of_the_formula(config: ClippedPgLossConfig, seed: int) -> None:
    tokens = tokens_of(seed)
    metrics = clipped_pg(tokens, config).metrics
    got = {name: float(metric.value) for name, metric in metrics.items()}
    assert got.pop("train/policy_loss")
    assert tokens.entropy_N is not None
    assert got.pop("train/entropy") == pytest.approx(
        float(tokens.entropy_N.detach()[tokens.mask_N].sum())
    )
    assert got == pytest.approx(reference(tokens, config), rel=1e-11, abs=1e-11)


def test_the_policy_loss_is_divided_like_the_gradient() -> None:
    for config in SPECS:
        kind = clipped_pg(tokens_of(0), config).metrics["train/policy_loss"].reduction
        assert kind is PartialReduction.LOSS


def test_k3_is_never_negative_and_both_estimate_the_same_divergence() -> None:
    rng = torch.Generator().manual_seed(0)
    policy = torch.log_softmax(torch.randn(6, generator=rng, dtype=torch.float64), 0)
    other = torch.log_softmax(torch.randn(6, generator=rng, dtype=torch.float64), 0)
    exact = float((policy.exp() * (policy - other)).sum())
    for kind in ("k1", "k3"):
        estimate = (policy.exp() * kl_penalty(policy, other, kind)).sum()
        assert float(estimate) == pytest.approx(exact)
    assert (kl_penalty(policy, other, "k3") >= 0).all()

"""What holds for every loss, by every correction and normalisation."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import SPECS, expected, keys_of, picked, tokens_of

from offbeat.algorithms.divisors import denominator
from offbeat.algorithms.losses import LOSSES, LossSums, LossTokens
from offbeat.algorithms.tokens import PartialMetric, PartialReduction
from offbeat.config.sections.loss import ClippedPgLossConfig, LossConfig

every_loss = pytest.mark.parametrize("config", SPECS.values(), ids=SPECS)
seeds = st.integers(0, 10_000)
few = settings(max_examples=20)  # for each of the losses


def sums_of(tokens: LossTokens, config: LossConfig) -> LossSums:
    sums = LOSSES[config.name](tokens, config)
    sums.loss.backward()
    return sums


def gradient(tokens: LossTokens) -> torch.Tensor:
    assert tokens.logprobs_N.grad is not None
    return tokens.logprobs_N.grad


def count(sums: LossSums, name: str) -> float:
    return float(sums.metrics[f"train/{name}"].value)


def combined(parts: list[PartialMetric]) -> float:
    values = [float(each.value) for each in parts]
    return {PartialReduction.MIN: min, PartialReduction.MAX: max}.get(parts[0].reduction, sum)(
        values
    )


@every_loss
@few
@given(seed=seeds)
def test_value_and_gradient_are_those_of_plain_loops(config: LossConfig, seed: int) -> None:
    tokens = tokens_of(seed)
    sums, want = sums_of(tokens, config), expected(tokens, config)
    assert sums.loss.item() == pytest.approx(want.loss, rel=1e-11, abs=1e-11)
    assert gradient(tokens).tolist() == pytest.approx(want.gradient, rel=1e-10, abs=1e-11)
    assert count(sums, "entropy") == pytest.approx(want.entropy, rel=1e-12)
    assert tokens.entropy_N is not None
    bonus = [0.0] * len(want.gradient) if tokens.entropy_N.grad is None else tokens.entropy_N.grad
    assert list(map(float, bonus)) == pytest.approx(want.entropy_gradient, rel=1e-12)


@every_loss
@few
@given(seed=seeds)
def test_what_is_held_and_dropped_is_counted(config: LossConfig, seed: int) -> None:
    tokens = tokens_of(seed)
    sums, want, keys = sums_of(tokens, config), expected(tokens, config), keys_of(config)
    if config.name not in ("sft", "sapo"):
        assert count(sums, "clip_fraction_low") == want.at_bound["low"]
        assert count(sums, "clip_fraction_high") == want.at_bound["high"]
    assert ("train/clip_fraction_dual" in sums.metrics) == (keys.dual_clip is not None)
    if keys.dual_clip is not None:
        assert count(sums, "clip_fraction_dual") == want.at_bound["dual"]
    if keys.sequence_band is not None:
        assert count(sums, "sequence_masked_fraction") == want.dropped_sequences
        kind = sums.metrics["train/sequence_masked_fraction"].reduction
        assert kind is PartialReduction.SEQUENCES
    if keys.off_policy_delta is not None:
        assert count(sums, "off_policy_masked_fraction") == want.off_policy_sequences
    if keys.icepop_band is not None and keys.sequence_band is None:
        assert count(sums, "icepop_masked_fraction") == want.weights.count(0.0)


@every_loss
@few
@given(seed=seeds, poison=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
def test_what_is_masked_leaks_neither_forward_nor_backward(
    config: LossConfig, seed: int, poison: float
) -> None:
    clean = tokens_of(seed)
    assert clean.reference_N is not None and clean.staleness_N is not None
    assert clean.generation_N is not None and clean.entropy_N is not None

    def poisoned(values: torch.Tensor) -> torch.Tensor:
        return torch.where(clean.mask_N, values.detach(), poison)

    bad = replace(
        clean,
        logprobs_N=poisoned(clean.logprobs_N).requires_grad_(),
        old_N=poisoned(clean.old_N),
        generation_N=poisoned(clean.generation_N),
        reference_N=poisoned(clean.reference_N),
        entropy_N=poisoned(clean.entropy_N),
        advantages_N=poisoned(clean.advantages_N),
        staleness_N=torch.where(clean.mask_N, clean.staleness_N, -(2**40)),
    )
    one, other = sums_of(clean, config), sums_of(bad, config)
    assert one.loss.item() == other.loss.item()
    assert torch.equal(gradient(clean), gradient(bad))
    assert not gradient(bad)[~bad.mask_N].any()
    assert one.spread is not None and other.spread is not None
    assert torch.equal(one.spread, other.spread)
    assert torch.equal(one.divisor, other.divisor)
    for name, metric in one.metrics.items():
        assert float(metric.value) == float(other.metrics[name].value), name


@every_loss
@few
@given(seed=seeds)
def test_the_order_of_tokens_and_sequences_does_not_matter(config: LossConfig, seed: int) -> None:
    rng, tokens = torch.Generator().manual_seed(seed), tokens_of(seed)
    order = torch.randperm(len(tokens.mask_N), generator=rng)
    names = torch.randperm(tokens.sequences, generator=rng)
    shuffled = picked(tokens, order, names[tokens.sequence_N][order], tokens.sequences)
    one, other = sums_of(tokens, config), sums_of(shuffled, config)
    assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-12, abs=1e-12)
    assert torch.allclose(gradient(tokens)[order], gradient(shuffled), rtol=1e-12, atol=1e-14)
    assert one.spread is not None and other.spread is not None
    assert torch.allclose(one.spread, other.spread, rtol=1e-12)
    assert torch.allclose(one.divisor, other.divisor, rtol=1e-12)
    for name, metric in one.metrics.items():
        assert float(metric.value) == pytest.approx(
            float(other.metrics[name].value), rel=1e-12, abs=1e-12
        ), name


@every_loss
@few
@given(seed=seeds, calls=st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_sums_over_several_calls_are_those_of_one(
    config: LossConfig, seed: int, calls: list[int]
) -> None:
    """However sequences are spread over microbatches, chunks and ranks."""
    tokens = tokens_of(seed)
    whole = sums_of(tokens, config)
    call_S = torch.tensor(calls)
    parts, gradients = list[LossSums](), torch.zeros_like(tokens.logprobs_N)
    for call in sorted(set(calls)):
        index = torch.nonzero(call_S[tokens.sequence_N] == call)[:, 0]
        present, sequence = torch.unique(tokens.sequence_N[index], return_inverse=True)
        part = picked(tokens, index, sequence, len(present))
        parts.append(sums_of(part, config))
        gradients[index] = gradient(part)
    assert sum(each.loss.item() for each in parts) == pytest.approx(
        whole.loss.item(), rel=1e-12, abs=1e-12
    )
    assert torch.allclose(gradients, gradient(tokens), rtol=1e-12, atol=1e-14)
    for name, metric in whole.metrics.items():
        assert combined([each.metrics[name] for each in parts]) == pytest.approx(
            float(metric.value), rel=1e-12, abs=1e-12
        ), name
    assert torch.allclose(torch.stack([each.divisor for each in parts]).sum(0), whole.divisor)
    spreads = [each.spread for each in parts if each.spread is not None]
    assert whole.spread is not None
    assert torch.allclose(torch.stack(spreads).sum(0), whole.spread, rtol=1e-12)


@every_loss
@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf])
def test_a_call_without_a_valid_token_adds_nothing(config: LossConfig, poison: float) -> None:
    drawn = tokens_of(0)
    nothing = torch.full_like(drawn.old_N, poison)
    tokens = LossTokens(
        logprobs_N=nothing.clone().requires_grad_(),
        old_N=nothing,
        generation_N=nothing,
        reference_N=nothing,
        advantages_N=nothing,
        mask_N=torch.zeros_like(drawn.mask_N),
        sequence_N=drawn.sequence_N,
        sequences=drawn.sequences,
        staleness_N=drawn.staleness_N,
        entropy_N=nothing,
    )
    sums = sums_of(tokens, config)
    assert sums.loss.item() == 0
    assert not gradient(tokens).any()
    assert not sums.divisor.any()
    assert sums.spread is not None and not sums.spread.any()
    for name, metric in sums.metrics.items():
        neutral = {PartialReduction.MIN: math.inf, PartialReduction.MAX: -math.inf}.get(
            metric.reduction, 0.0
        )
        assert float(metric.value) == neutral, name


@every_loss
@few
@given(seed=seeds, factor=st.sampled_from([0.25, 3.0]))
def test_the_policy_loss_is_proportional_to_advantages(
    config: LossConfig, seed: int, factor: float
) -> None:
    """What ``step_std`` rests on, and why it goes with no KL penalty and no entropy bonus."""
    plain = config.model_copy(update={"kl_coef": 0.0, "entropy_coef": 0.0, "kl_reward_coef": 0.0})
    one = tokens_of(seed)
    other = tokens_of(seed, advantages_N=factor * one.advantages_N)
    sums = sums_of(one, plain), sums_of(other, plain)
    by = 1.0 if config.name == "sft" else factor
    assert sums[1].loss.item() == pytest.approx(by * sums[0].loss.item(), rel=1e-12)
    assert torch.allclose(gradient(other), by * gradient(one), rtol=1e-12, atol=0)


@every_loss
@few
@given(seed=seeds)
def test_only_differences_of_logprobs_count(config: LossConfig, seed: int) -> None:
    one = tokens_of(seed)
    assert one.reference_N is not None and one.generation_N is not None
    other = tokens_of(
        seed,
        logprobs_N=(one.logprobs_N.detach() - 0.5).requires_grad_(),
        old_N=one.old_N - 0.5,
        generation_N=one.generation_N - 0.5,
        reference_N=one.reference_N - 0.5,
    )
    sums = sums_of(one, config), sums_of(other, config)
    assert torch.allclose(gradient(other), gradient(one), rtol=1e-9, atol=1e-12)
    if config.name not in ("cispo", "sft"):
        assert sums[1].loss.item() == pytest.approx(sums[0].loss.item(), rel=1e-9, abs=1e-12)


@every_loss
@few
@given(seed=seeds)
def test_a_step_of_the_same_data_twice_is_that_step(config: LossConfig, seed: int) -> None:
    once, size = tokens_of(seed), len(tokens_of(seed).mask_N)
    index = torch.arange(size).repeat(2)
    sequence = torch.cat([once.sequence_N, once.sequence_N + once.sequences])
    twice = picked(once, index, sequence, 2 * once.sequences)
    parts = [sums_of(each, config) for each in (once, twice)]
    means = [denominator(config, [each.divisor.tolist()]) for each in parts]
    if means[0]:
        losses = [float(each.loss.detach()) / by for each, by in zip(parts, means, strict=True)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-11, abs=1e-12)
        both = gradient(twice)[:size] + gradient(twice)[size:]
        assert torch.allclose(both / means[1], gradient(once) / means[0], rtol=1e-10, atol=1e-13)


@every_loss
@few
@given(seed=seeds)
def test_on_policy_it_is_the_plain_policy_gradient(config: LossConfig, seed: int) -> None:
    drawn = tokens_of(seed)
    logprobs = drawn.logprobs_N.detach()
    tokens = replace(
        drawn, old_N=logprobs, generation_N=logprobs, reference_N=None, logprobs_N=logprobs.clone()
    )
    tokens.logprobs_N.requires_grad_()
    sums_of(tokens, config)
    lengths = torch.zeros(5).index_add(0, tokens.sequence_N, tokens.mask_N.float()).clamp(min=1)
    share = 1 / lengths[tokens.sequence_N] if config.normalize == "sequences" else 1.0
    pull = -torch.ones_like(logprobs) if config.name == "sft" else -tokens.advantages_N
    want = torch.where(tokens.mask_N, pull * share, 0.0)
    assert torch.allclose(gradient(tokens), want, rtol=1e-6)


@every_loss
@few
@given(gap=st.floats(-1e4, 1e4), sign=st.sampled_from([-1.0, 1.0]), seed=seeds)
def test_extreme_log_ratios_of_valid_tokens_stay_finite(
    config: LossConfig, gap: float, sign: float, seed: int
) -> None:
    tokens = tokens_of(seed)
    far = torch.randn(len(tokens.mask_N), generator=torch.Generator().manual_seed(seed)).sign()
    wild = replace(
        tokens,
        logprobs_N=(tokens.old_N + gap * far).float().requires_grad_(),
        generation_N=tokens.old_N - gap,
        advantages_N=torch.full_like(tokens.old_N, sign),
    )
    sums = sums_of(wild, config)
    assert sums.loss.isfinite() and sums.loss.dtype is torch.float32
    assert gradient(wild).isfinite().all()
    assert sums.spread is not None and sums.spread.isfinite().all()
    assert all(metric.value.isfinite() for metric in sums.metrics.values())


@every_loss
@pytest.mark.parametrize("where", ["logprobs_N", "old_N", "generation_N"])
def test_a_nan_at_a_valid_token_is_not_hidden(config: LossConfig, where: str) -> None:
    keys = keys_of(config)
    corrected = keys.tis_cap or keys.icepop_band or keys.sequence_band or keys.sequence_cap
    reads = {
        "logprobs_N": True,
        "old_N": config.name != "sft" and keys.old_logprobs != "current",
        "generation_N": bool(corrected or keys.off_policy_delta),
    }
    tokens = tokens_of(0)
    values: torch.Tensor = getattr(tokens, where).detach().clone()
    values[0] = math.nan
    assert (
        bool(LOSSES[config.name](replace(tokens, **{where: values}), config).loss.isnan())
        == (reads[where])
    )


@every_loss
def test_half_precision_counts_exactly(config: LossConfig) -> None:
    """bfloat16 has no number between 256 and 258."""
    tokens = tokens_of(0, (301, 1))
    half = replace(tokens, logprobs_N=tokens.logprobs_N.detach().bfloat16().requires_grad_())
    half.mask_N[:301] = True
    sums, plain = (
        sums_of(half, config),
        config.model_copy(update={"normalize": "tokens", "count_dropped": True}),
    )
    assert LOSSES[config.name](half, plain).divisor[0] == 301
    assert sums.loss.isfinite()
    assert gradient(half).dtype is torch.bfloat16


def test_every_loss_has_its_name() -> None:
    assert {name: loss.__name__ for name, loss in LOSSES.items()} == {
        name: name for name in ("clipped_pg", "gspo", "cispo", "sapo", "sft")
    }


def test_without_versions_there_is_no_spread() -> None:
    assert (
        LOSSES["gspo"](replace(tokens_of(0), staleness_N=None), ClippedPgLossConfig()).spread
        is None
    )

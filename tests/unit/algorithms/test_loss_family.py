"""What holds for every loss, by every correction and normalisation."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import SPECS, expected, picked, tokens_of

from offbeat.algorithms.losses import LOSSES, LossSums, LossTokens
from offbeat.algorithms.metrics import Metric, Reduction
from offbeat.messages.training import LossSpec

every_loss = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
seeds = st.integers(0, 10_000)


def sums_of(tokens: LossTokens, spec: LossSpec) -> LossSums:
    sums = LOSSES[spec.name](tokens, spec)
    sums.loss.backward()
    return sums


def gradient(tokens: LossTokens) -> torch.Tensor:
    assert tokens.logprobs_N.grad is not None
    return tokens.logprobs_N.grad


def count(sums: LossSums, name: str) -> float:
    return float(sums.metrics[f"train/{name}"].value)


def combined(parts: list[Metric]) -> float:
    values = [float(each.value) for each in parts]
    return {Reduction.MIN: min, Reduction.MAX: max}.get(parts[0].reduction, sum)(values)


@every_loss
@given(seed=seeds)
def test_value_and_gradient_are_those_of_plain_loops(spec: LossSpec, seed: int) -> None:
    tokens = tokens_of(seed)
    sums, want = sums_of(tokens, spec), expected(tokens, spec)
    assert sums.loss.item() == pytest.approx(want.loss, rel=1e-11, abs=1e-11)
    assert gradient(tokens).tolist() == pytest.approx(want.gradient, rel=1e-10, abs=1e-11)


@every_loss
@given(seed=seeds)
def test_what_is_held_and_dropped_is_counted(spec: LossSpec, seed: int) -> None:
    tokens = tokens_of(seed)
    sums, want = sums_of(tokens, spec), expected(tokens, spec)
    assert sums.tokens.item() == len(want.weights) == int(tokens.mask_N.sum())
    if spec.name != "sft":
        assert count(sums, "clip_fraction_low") == want.held["low"]
        assert count(sums, "clip_fraction_high") == want.held["high"]
    assert ("train/clip_fraction_dual" in sums.metrics) == (spec.dual_clip is not None)
    if spec.dual_clip is not None:
        assert count(sums, "clip_fraction_dual") == want.held["dual"]
    if spec.sequence_band is not None:
        assert count(sums, "sequence_masked_fraction") == want.dropped_sequences
        kind = sums.metrics["train/sequence_masked_fraction"].reduction
        assert kind is Reduction.SEQUENCES
    if spec.icepop_band is not None:
        assert count(sums, "icepop_masked_fraction") == want.weights.count(0.0)


@every_loss
@given(seed=seeds, poison=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
def test_what_is_masked_leaks_neither_forward_nor_backward(
    spec: LossSpec, seed: int, poison: float
) -> None:
    clean = tokens_of(seed)
    assert clean.reference_N is not None and clean.staleness_N is not None

    def poisoned(values: torch.Tensor) -> torch.Tensor:
        return torch.where(clean.mask_N, values.detach(), poison)

    bad = replace(
        clean,
        logprobs_N=poisoned(clean.logprobs_N).requires_grad_(),
        old_N=poisoned(clean.old_N),
        generation_N=poisoned(clean.generation_N),
        reference_N=poisoned(clean.reference_N),
        advantages_N=poisoned(clean.advantages_N),
        staleness_N=torch.where(clean.mask_N, clean.staleness_N, -(2**40)),
    )
    one, other = sums_of(clean, spec), sums_of(bad, spec)
    assert one.loss.item() == other.loss.item()
    assert torch.equal(gradient(clean), gradient(bad))
    assert not gradient(bad)[~bad.mask_N].any()
    assert one.spread is not None and other.spread is not None
    assert torch.equal(one.spread, other.spread)
    for name, metric in one.metrics.items():
        assert float(metric.value) == float(other.metrics[name].value), name


@every_loss
@given(seed=seeds)
def test_the_order_of_tokens_and_sequences_does_not_matter(spec: LossSpec, seed: int) -> None:
    rng, tokens = torch.Generator().manual_seed(seed), tokens_of(seed)
    order = torch.randperm(len(tokens.mask_N), generator=rng)
    names = torch.randperm(tokens.sequences, generator=rng)
    shuffled = picked(tokens, order, names[tokens.sequence_N][order], tokens.sequences)
    one, other = sums_of(tokens, spec), sums_of(shuffled, spec)
    assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-12, abs=1e-12)
    assert torch.allclose(gradient(tokens)[order], gradient(shuffled), rtol=1e-12, atol=1e-14)
    assert one.spread is not None and other.spread is not None
    assert torch.allclose(one.spread, other.spread, rtol=1e-12)
    for name, metric in one.metrics.items():
        assert float(metric.value) == pytest.approx(
            float(other.metrics[name].value), rel=1e-12, abs=1e-12
        ), name


@every_loss
@given(seed=seeds, calls=st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_sums_over_several_calls_are_those_of_one(
    spec: LossSpec, seed: int, calls: list[int]
) -> None:
    """However sequences are spread over microbatches, chunks and ranks."""
    tokens = tokens_of(seed)
    whole = sums_of(tokens, spec)
    call_S = torch.tensor(calls)
    parts, gradients = list[LossSums](), torch.zeros_like(tokens.logprobs_N)
    for call in sorted(set(calls)):
        index = torch.nonzero(call_S[tokens.sequence_N] == call)[:, 0]
        present, sequence = torch.unique(tokens.sequence_N[index], return_inverse=True)
        part = picked(tokens, index, sequence, len(present))
        parts.append(sums_of(part, spec))
        gradients[index] = gradient(part)
    assert sum(each.loss.item() for each in parts) == pytest.approx(
        whole.loss.item(), rel=1e-12, abs=1e-12
    )
    assert torch.allclose(gradients, gradient(tokens), rtol=1e-12, atol=1e-14)
    assert sum(float(each.tokens) for each in parts) == whole.tokens.item()
    assert sum(float(each.sequences) for each in parts) == whole.sequences.item()
    for name, metric in whole.metrics.items():
        assert combined([each.metrics[name] for each in parts]) == pytest.approx(
            float(metric.value), rel=1e-12, abs=1e-12
        ), name
    spreads = [each.spread for each in parts if each.spread is not None]
    assert whole.spread is not None
    assert torch.allclose(torch.stack(spreads).sum(0), whole.spread, rtol=1e-12)


@every_loss
@given(seed=seeds)
def test_on_policy_it_is_the_plain_policy_gradient(spec: LossSpec, seed: int) -> None:
    drawn = tokens_of(seed)
    logprobs = drawn.logprobs_N.detach()
    tokens = replace(
        drawn, old_N=logprobs, generation_N=logprobs, reference_N=None, logprobs_N=logprobs.clone()
    )
    tokens.logprobs_N.requires_grad_()
    sums_of(tokens, spec)
    lengths = torch.zeros(5).index_add(0, tokens.sequence_N, tokens.mask_N.float()).clamp(min=1)
    share = 1 / lengths[tokens.sequence_N] if spec.normalize == "sequences" else 1.0
    pull = -torch.ones_like(logprobs) if spec.name == "sft" else -tokens.advantages_N
    want = torch.where(tokens.mask_N, pull * share, 0.0)
    assert torch.allclose(gradient(tokens), want, rtol=1e-6)


@every_loss
@given(gap=st.floats(-1e4, 1e4), sign=st.sampled_from([-1.0, 1.0]), seed=seeds)
def test_extreme_log_ratios_of_valid_tokens_stay_finite(
    spec: LossSpec, gap: float, sign: float, seed: int
) -> None:
    tokens = tokens_of(seed)
    far = torch.randn(len(tokens.mask_N), generator=torch.Generator().manual_seed(seed)).sign()
    wild = replace(
        tokens,
        logprobs_N=(tokens.old_N + gap * far).float().requires_grad_(),
        generation_N=tokens.old_N - gap,
        advantages_N=torch.full_like(tokens.old_N, sign),
    )
    sums = sums_of(wild, spec)
    assert sums.loss.isfinite() and sums.loss.dtype is torch.float32
    assert gradient(wild).isfinite().all()
    assert sums.spread is not None and sums.spread.isfinite().all()
    assert all(metric.value.isfinite() for metric in sums.metrics.values())


@every_loss
@pytest.mark.parametrize("where", ["logprobs_N", "old_N", "generation_N"])
def test_a_nan_at_a_valid_token_is_not_hidden(spec: LossSpec, where: str) -> None:
    corrected = spec.tis_cap or spec.icepop_band or spec.sequence_band
    reads = {
        "logprobs_N": True,
        "old_N": spec.name != "sft" and spec.old_logprobs != "current",
        "generation_N": bool(corrected),
    }
    tokens = tokens_of(0)
    values: torch.Tensor = getattr(tokens, where).detach().clone()
    values[0] = math.nan
    assert (
        bool(LOSSES[spec.name](replace(tokens, **{where: values}), spec).loss.isnan())
        == (reads[where])
    )


@every_loss
def test_half_precision_counts_exactly(spec: LossSpec) -> None:
    """bfloat16 has no number between 256 and 258."""
    tokens = tokens_of(0, (301, 1))
    half = replace(tokens, logprobs_N=tokens.logprobs_N.detach().bfloat16().requires_grad_())
    half.mask_N[:301] = True
    sums = sums_of(half, spec)
    assert sums.tokens.item() == 301
    assert gradient(half).dtype is torch.bfloat16


def test_every_loss_has_its_name() -> None:
    assert {name: loss.__name__ for name, loss in LOSSES.items()} == {
        name: name for name in ("clipped_pg", "gspo", "cispo", "sft")
    }


def test_without_versions_there_is_no_spread() -> None:
    assert LOSSES["gspo"](replace(tokens_of(0), staleness_N=None), LossSpec()).spread is None

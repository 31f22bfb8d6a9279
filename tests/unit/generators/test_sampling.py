"""Noise that is a pure function, and draws that follow the distribution."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.generators.embedded.rows import draw, noise_key, uniforms

DRAWS = 40_000


def many_uniforms(seed: int = 1) -> torch.Tensor:
    return uniforms(torch.full((DRAWS,), noise_key(seed, 0)), torch.arange(DRAWS))


def frequencies(
    logits: list[float], temperature: float = 1.0, top_p: float | None = None
) -> list[float]:
    rows = torch.tensor(logits).expand(DRAWS, -1)
    top_p_R = None if top_p is None else torch.full((DRAWS,), top_p, dtype=torch.float64)
    tokens, _ = draw(rows, torch.full((DRAWS,), temperature), many_uniforms(), top_p_R)
    return (torch.bincount(tokens, minlength=len(logits)) / DRAWS).tolist()


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    noise = many_uniforms()
    assert noise.min() >= 0
    assert noise.max() < 1
    counts = torch.histc(noise, bins=20, min=0, max=1)
    assert (counts / DRAWS - 0.05).abs().max() < 0.005
    assert abs(torch.corrcoef(torch.stack((noise[:-1], noise[1:])))[0, 1]) < 0.02


@given(
    seed=st.integers(-(2**70), 2**70), sample=st.integers(0, 10_000), position=st.integers(0, 2**31)
)
def test_noise_is_a_pure_function_of_seed_sample_and_position(
    seed: int, sample: int, position: int
) -> None:
    key = torch.tensor([noise_key(seed, sample)])
    first = uniforms(key, torch.tensor([position]))
    among_others = uniforms(key.repeat(7), torch.arange(position - 3, position + 4))
    assert first[0] == among_others[3]
    assert 0 <= first[0] < 1


def test_neighbouring_seeds_samples_and_positions_share_no_noise() -> None:
    keys = torch.tensor([noise_key(seed, sample) for seed in range(20) for sample in range(20)])
    noise = uniforms(keys.repeat_interleave(20), torch.arange(20).repeat(400))
    assert len(noise.unique()) == 8000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    want = torch.softmax(torch.tensor(logits) / temperature, -1).tolist()
    assert frequencies(logits, temperature) == pytest.approx(want, abs=0.01)


def test_top_p_keeps_the_most_probable_tokens_up_to_the_one_that_crosses_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert frequencies(logits, top_p=0.7) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.01)
    assert frequencies(logits, top_p=0.5) == pytest.approx([0, 1, 0, 0])
    assert frequencies(logits, top_p=1.0) == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.01)


def test_logprobs_are_of_the_whole_vocabulary_at_the_temperature_whatever_top_p_cuts() -> None:
    logits = torch.tensor([[0.3, 1.0, -2.0, 0.9]])
    noise = torch.tensor([0.2], dtype=torch.float64)
    top_p = torch.tensor([0.4], dtype=torch.float64)
    tokens, logprobs = draw(logits, torch.tensor([0.7]), noise, top_p)
    assert tokens.tolist() == [1]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits / 0.7, -1)[0, 1]))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(3, -1)
    edges = torch.tensor([0.0, 0.5, 1 - 2**-52], dtype=torch.float64)
    tokens, _ = draw(logits, torch.ones(3), edges, None)
    assert tokens.tolist() == [1, 3, 3]


def test_a_row_draws_the_same_token_whether_or_not_another_row_is_cut() -> None:
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    noise = many_uniforms()[:50]
    alone, _ = draw(logits, torch.ones(50), noise, None)
    top_p = torch.tensor([1.0, 0.5], dtype=torch.float64).repeat(25)
    mixed, _ = draw(logits, torch.ones(50), noise, top_p)
    assert mixed[::2].tolist() == alone[::2].tolist()


def test_logits_that_are_not_finite_give_a_nan_logprob_and_a_token_of_the_vocabulary() -> None:
    tokens, logprobs = draw(
        torch.full((1, 4), math.nan), torch.ones(1), torch.zeros(1, dtype=torch.float64), None
    )
    assert 0 <= tokens[0] < 4
    assert math.isnan(logprobs[0])

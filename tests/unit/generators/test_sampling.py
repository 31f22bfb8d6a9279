"""Noise that is a pure function, and draws that follow the distribution."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat.generators.embedded.rows import Filters, draw, noise_key, uniforms

DRAWS = 40_000


def many_uniforms(seed: int = 1) -> torch.Tensor:
    return uniforms(torch.full((DRAWS,), noise_key(seed, 0)), torch.arange(DRAWS))


def filters_of(
    rows: int = 1,
    /,
    *,
    min_p: float | None = None,
    top_k: float | None = None,
    top_p: float | None = None,
) -> Filters:
    """The same limits for each row."""
    columns = (
        None if value is None else torch.full((rows,), value, dtype=torch.float64)
        for value in (min_p, top_k, top_p)
    )
    return Filters(*columns)


def frequencies(logits: list[float], temperature: float = 1.0, **limits: float) -> list[float]:
    rows = torch.tensor(logits).expand(DRAWS, -1)
    filters = filters_of(DRAWS, **limits) if limits else None
    tokens, _ = draw(rows, torch.full((DRAWS,), temperature), many_uniforms(), filters)
    return (torch.bincount(tokens, minlength=len(logits)) / DRAWS).tolist()


def plainly_filtered(
    logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float
) -> torch.Tensor:
    """Probabilities of one row after min_p, top_k and top_p: token by token, in float64."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = sorted(range(len(probs)), key=lambda token: (-float(probs[token]), token))
    most = float(probs[order[0]])
    kept = [token for token in order if not float(probs[token]) < min_p * most]
    if 0 < top_k < len(kept):
        last = float(probs[kept[top_k - 1]])
        kept = [token for token in kept if float(probs[token]) >= last]
    mass, before, nucleus = float(probs[kept].sum()), 0.0, list[int]()
    for token in kept:
        if top_p < 1 and before >= top_p * mass:
            break
        nucleus.append(token)
        before += float(probs[token])
    left = torch.zeros_like(probs)
    left[nucleus] = probs[nucleus]
    return left / left.sum()


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
    tokens, logprobs = draw(logits, torch.tensor([0.7]), noise, filters_of(top_p=0.4))
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
    top_p = torch.tensor([math.inf, 0.5], dtype=torch.float64).repeat(25)
    mixed, _ = draw(logits, torch.ones(50), noise, Filters(top_p_R=top_p))
    assert mixed[::2].tolist() == alone[::2].tolist()


def test_top_k_keeps_the_most_probable_tokens_and_ties_of_the_last_one() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert frequencies(logits, top_k=2) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.01)
    assert frequencies(logits, top_k=1) == [0, 1, 0, 0]
    assert frequencies(logits, top_k=9) == pytest.approx([0.1, 0.5, 0.15, 0.25], abs=0.01)
    assert frequencies([0.0, 1.0, 0.0, -9.0], top_k=2) == pytest.approx(
        frequencies([0.0, 1.0, 0.0, -math.inf]), abs=0.01
    )


def test_min_p_keeps_the_tokens_of_a_part_of_the_largest_probability_after_the_temperature() -> (
    None
):
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert frequencies(logits, min_p=0.4) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.01)
    assert frequencies(logits, min_p=0.25) == pytest.approx([0, 5 / 9, 1 / 6, 5 / 18], abs=0.01)
    assert frequencies(logits, min_p=1.0) == [0, 1, 0, 0]
    # At temperature 2 the ratios are the square roots: 0.45, 1, 0.55, 0.71
    assert frequencies(logits, 2.0, min_p=0.5)[0] == 0
    assert frequencies(logits, 2.0, min_p=0.5)[2] > 0.2


def test_top_p_counts_the_mass_that_top_k_and_min_p_left() -> None:
    logits = [math.log(p) for p in (0.2, 0.5, 0.1, 0.2)]
    assert frequencies(logits, top_p=0.55)[0] > 0, "0.5 of the whole mass is less than 0.55"
    for limits in ({"min_p": 0.3}, {"top_k": 3.0}):
        only = frequencies(logits, top_p=0.55, **limits)
        assert only == [0, 1, 0, 0], "0.5 of the 0.9 that are left is more than 0.55"


LOGITS = st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.5, 0.5, 1.0, 2.0]), min_size=2)


@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.03, 0.21, 0.6, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 50]),
    top_p=st.sampled_from([0.123, 0.4567, 0.789, 1.0]),
    noise=st.floats(0, 1 - 2**-52),
)
def test_filters_together_leave_what_a_plain_computation_leaves(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float, noise: float
) -> None:
    row = torch.tensor(logits, dtype=torch.float64)
    want = plainly_filtered(row, temperature, min_p, top_k, top_p)
    probs, tokens = torch.softmax(row / temperature, -1).sort(descending=True, stable=True)
    limits = filters_of(
        min_p=min_p, top_k=top_k or math.inf, top_p=top_p if top_p < 1 else math.inf
    )
    left = torch.zeros_like(row)
    left[tokens] = limits.weights(probs[None])[0]
    torch.testing.assert_close(left / left.sum(), want)
    drawn, _ = draw(
        row[None],
        torch.tensor([temperature], dtype=torch.float64),
        torch.tensor([noise], dtype=torch.float64),
        limits,
    )
    assert want[drawn[0]] > 0


@pytest.mark.parametrize("seed", range(5))
def test_draws_under_all_filters_are_as_frequent_as_a_plain_computation_says(seed: int) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(seed))
    want = plainly_filtered(logits, 1.3, 0.15, 6, 0.85).tolist()
    got = frequencies(logits.tolist(), 1.3, min_p=0.15, top_k=6, top_p=0.85)
    assert got == pytest.approx(want, abs=0.01)
    assert [p > 0 for p in got] == [p > 0 for p in want]
    assert 0 in want


@pytest.mark.parametrize("limits", [{"top_k": 1.0}, {"min_p": 1.0}, {"top_p": 1e-9}])
def test_logprobs_are_of_the_whole_vocabulary_where_filters_leave_one_token(
    limits: dict[str, float],
) -> None:
    logits = torch.tensor([[0.3, 1.0, -2.0, 0.9]])
    noise = torch.tensor([0.9], dtype=torch.float64)
    tokens, logprobs = draw(logits, torch.tensor([0.7]), noise, filters_of(**limits))
    assert tokens.tolist() == [1]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits / 0.7, -1)[0, 1]))
    assert logprobs[0] < -0.5


def test_a_row_draws_the_same_token_whatever_filters_other_rows_have() -> None:
    logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    noise, warm = many_uniforms()[:64], torch.ones(64)
    mixed = torch.tensor(
        [
            [0.0, math.inf, math.inf],
            [0.3, math.inf, math.inf],
            [0.0, 3, math.inf],
            [0.0, math.inf, 0.6],
        ],
        dtype=torch.float64,
    ).repeat(16, 1)
    together, _ = draw(logits, warm, noise, Filters(*mixed.unbind(1)))
    apart = [
        None,
        filters_of(64, min_p=0.3),
        filters_of(64, top_k=3),
        filters_of(64, top_p=0.6),
    ]
    for kind, filters in enumerate(apart):
        alone, _ = draw(logits, warm, noise, filters)
        assert together[kind::4].tolist() == alone[kind::4].tolist()


class Operations(TorchDispatchMode):
    """Names of the tensor operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_draw_runs_the_operations_of_its_filters_only() -> None:
    logits, noise = torch.zeros(3, 8), torch.zeros(3, dtype=torch.float64)

    def operations(filters: Filters | None) -> list[str]:
        with Operations() as ran:
            draw(logits, torch.ones(3), noise, filters)
        return ran.names

    free = operations(None)
    assert not [name for name in free if "sort.stable" in name or "masked_fill" in name]
    nucleus = operations(filters_of(3, top_p=0.5))
    assert len([name for name in nucleus if "masked_fill" in name]) == 1
    assert not [name for name in nucleus if "logical_or" in name or "clamp.default" in name]


@pytest.mark.parametrize("limits", [{}, {"min_p": 0.1, "top_k": 2.0, "top_p": 0.9}], ids=len)
def test_logits_that_are_not_finite_give_a_nan_logprob_and_a_token_of_the_vocabulary(
    limits: dict[str, float],
) -> None:
    noise, filters = torch.zeros(1, dtype=torch.float64), filters_of(**limits) if limits else None
    tokens, logprobs = draw(torch.full((1, 4), math.nan), torch.ones(1), noise, filters)
    assert 0 <= tokens[0] < 4
    assert math.isnan(logprobs[0])

"""Log-probabilities and entropies of logits that are too many to be worked on at once."""

import math

import pytest
import torch
from torch import Tensor

from offbeat.trainers.torch.logprobs import token_logprobs, token_logprobs_and_entropies

PLACES, VOCABULARY, TOKENS = 50, 50_000, 70  # 2.5 million logits: more than are worked on at a time


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, and tokens of which several share a place, in no order; a few are the same token."""
    torch.manual_seed(0)
    which, target = torch.randint(PLACES, (TOKENS,)), torch.randint(VOCABULARY, (TOKENS,))
    which[-3:], target[-3:] = which[0], target[0]
    return torch.randn(PLACES, VOCABULARY).to(dtype).requires_grad_(), which, target


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_taken_in_parts_give_what_all_at_once_would(
    dtype: torch.dtype, temperature: float
) -> None:
    logits, which, target = drawn(dtype)
    pull = torch.linspace(-1, 1, TOKENS)
    token_logprobs(logits, which, target, temperature).mul(pull).sum().backward()
    whole = logits.detach().double().requires_grad_()
    want = torch.log_softmax(whole / temperature, -1)[which, target]
    want.mul(pull).sum().backward()
    assert whole.grad is not None
    assert logits.grad is not None
    got = token_logprobs(logits, which, target, temperature)
    assert torch.allclose(got.double(), want, atol=1e-5)
    error = 1e-6 if dtype is torch.float32 else 4e-3
    assert torch.allclose(logits.grad.double(), whole.grad, rtol=error, atol=1e-8)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropies_are_those_of_the_whole_softmax_and_so_is_their_gradient(
    dtype: torch.dtype, temperature: float
) -> None:
    logits, which, target = drawn(dtype)
    pull, bonus = torch.linspace(-1, 1, TOKENS), torch.linspace(2, -1, TOKENS)
    logprobs, entropies = token_logprobs_and_entropies(logits, which, target, temperature)
    (logprobs.mul(pull) + entropies.mul(bonus)).sum().backward()
    whole = logits.detach().double().requires_grad_()
    every = torch.log_softmax(whole / temperature, -1)
    want = -(every.exp() * every).sum(-1)[which]
    (every[which, target].mul(pull) + want.mul(bonus)).sum().backward()
    assert whole.grad is not None
    assert logits.grad is not None
    assert torch.equal(logprobs, token_logprobs(logits, which, target, temperature))
    assert torch.allclose(entropies.double(), want, rtol=1e-6)
    rtol, atol = (1e-5, 1e-8) if dtype is torch.float32 else (1e-9, 1e-14)
    assert torch.allclose(logits.grad.double(), whole.grad, rtol=rtol, atol=atol)


def test_a_token_that_cannot_be_drawn_adds_no_entropy() -> None:
    """A logit of minus infinity, as models mask ids that are not tokens."""
    never = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    first = torch.zeros(1, dtype=torch.int64)
    _, entropies = token_logprobs_and_entropies(never, first, first, 1.0)
    entropies.sum().backward()
    assert never.grad is not None
    assert entropies.tolist() == pytest.approx([math.log(2)])
    assert never.grad.tolist() == [pytest.approx([0.0, 0.0, 0.0], abs=1e-7)]


def test_a_row_does_not_depend_on_which_others_are_there() -> None:
    logits, which, target = drawn(torch.float32)
    alone = torch.arange(1)
    every = token_logprobs(logits, which, target, 1.0)
    for token, place in enumerate(which.tolist()):
        row = logits[place : place + 1]
        assert token_logprobs(row, 0 * alone, target[token : token + 1], 1.0) == every[token]


def test_of_no_places_there_is_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    logits = torch.zeros(0, VOCABULARY, requires_grad=True)
    logprobs = token_logprobs(logits, none, none, 1.0)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)

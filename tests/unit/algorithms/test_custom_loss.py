"""A loss of the user's own: the function decides the loss of a token, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import SPECS, as_custom, clipped, tokens_of
from torch import Tensor

from offbeat.algorithms.custom_loss import CustomLoss, LossRefused
from offbeat.algorithms.losses import LOSSES, LossSums, LossTokens
from offbeat.algorithms.tokens import PartialReduction
from offbeat.config.sections.loss import ClippedPgLossConfig, CustomLossConfig

CLIPPED = {name: each for name, each in SPECS.items() if isinstance(each, ClippedPgLossConfig)}
OF_RATIO = ("train/ratio_", "train/clip_fraction_")


def computed(tokens: LossTokens, function: Callable[..., Any], **options: Any) -> LossSums:
    config = CustomLossConfig(target="mine:loss", options=options)
    return CustomLoss(function, "mine:loss")(tokens, config)


@pytest.mark.parametrize("config", CLIPPED.values(), ids=CLIPPED)
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_the_same_formula_is_the_built_in_loss_through_every_correction_and_divisor(
    config: ClippedPgLossConfig, seed: int
) -> None:
    built_in, own = tokens_of(seed), tokens_of(seed)
    want = LOSSES["clipped_pg"](built_in, config)
    got = CustomLoss(clipped, "mine:clipped")(own, as_custom(config))
    want.loss.backward()
    got.loss.backward()
    assert own.logprobs_N.grad is not None and built_in.logprobs_N.grad is not None
    assert torch.equal(own.logprobs_N.grad, built_in.logprobs_N.grad)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.divisor, want.divisor)
    common = {name for name in want.metrics if not name.startswith(OF_RATIO)}
    assert got.metrics.keys() == common
    assert all(torch.equal(got.metrics[name].value, want.metrics[name].value) for name in common)


def test_the_function_sees_zeros_where_a_token_is_not_trained() -> None:
    seen = list[LossTokens]()

    def keep(tokens: LossTokens, options: dict[str, Any]) -> Tensor:
        seen.append(tokens)
        return -tokens.logprobs_N

    tokens = tokens_of(3)
    nothing_N = torch.where(tokens.mask_N, 0.0, torch.nan)
    computed(replace(tokens, old_N=tokens.old_N + nothing_N, reference_N=None), keep)
    (given_tokens,) = seen
    assert given_tokens.reference_N is None
    for name in ("logprobs_N", "old_N", "generation_N", "advantages_N", "staleness_N", "entropy_N"):
        values_N = getattr(given_tokens, name)
        assert not values_N[~tokens.mask_N].any(), name
    sums_S = given_tokens.sequence_sums(torch.ones_like(tokens.logprobs_N))
    assert sums_S.tolist() == [
        float(tokens.mask_N[tokens.sequence_N == each].sum()) for each in range(tokens.sequences)
    ]


def test_values_at_untrained_tokens_have_no_effect() -> None:
    def divided(tokens: LossTokens, options: dict[str, Any]) -> Tensor:
        return tokens.logprobs_N / tokens.mask_N

    tokens = tokens_of(4)
    sums = computed(tokens, divided)
    sums.loss.backward()
    assert tokens.logprobs_N.grad is not None
    assert sums.loss.isfinite() and tokens.logprobs_N.grad.isfinite().all()


def test_named_values_become_metrics_of_their_token_means() -> None:
    def shown(tokens: LossTokens, options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        gap_N = tokens.logprobs_N - tokens.old_N
        return -gap_N, {"gap": gap_N, "is_late": tokens.staleness_N > options["late"]}

    tokens = tokens_of(5)
    sums = computed(tokens, shown, late=2)
    gap, late = sums.metrics["loss/gap"], sums.metrics["loss/is_late"]
    assert gap.reduction is PartialReduction.TOKENS and not gap.value.requires_grad
    assert tokens.staleness_N is not None
    want = (tokens.logprobs_N - tokens.old_N)[tokens.mask_N].sum()
    assert gap.value.item() == pytest.approx(want.item())
    assert late.value == (tokens.staleness_N[tokens.mask_N] > 2).sum()


def of_shape(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[..., Tensor]:
    return lambda tokens, options: torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("function", "problem", "fix"),
    [
        (of_shape(), "the loss has shape [] for 18 tokens", "not a sum or mean"),
        (of_shape(18, 1), "the loss has shape [18, 1] for 18 tokens", "one number per token"),
        (of_shape(18, dtype=torch.int64), "the loss has dtype torch.int64", "Return loss_N"),
        (lambda t, o: None, "the loss is None, not a Tensor", "Return loss_N"),
        (lambda t, o: [0.0] * 18, "the loss is of type list, not a Tensor", "Return loss_N"),
        (lambda t, o: (t.old_N, t.old_N), "a tuple of (a Tensor [18], a Tensor [18])", "a dict"),
        (lambda t, o: (t.old_N, {"x": 1}), "value 'x' is of type int", "[N] each"),
        (lambda t, o: (t.old_N, {"x": t.old_N.sum()}), "value 'x' has shape []", "[N]"),
        (lambda t, o: (t.old_N, {"a b": t.old_N}), "a value is called 'a b'", "Name it"),
        (lambda t, o: t.old_N * o["beta"], "in <lambda>: KeyError: 'beta'", "Repair"),
    ],
)
def test_any_other_result_is_refused_with_what_came_back_and_the_fix(
    function: Callable[..., Any], problem: str, fix: str
) -> None:
    with pytest.raises(LossRefused) as caught:
        computed(tokens_of(0), function)
    text = str(caught.value)
    assert text.startswith("algorithm.loss.target=mine:loss: ")
    assert problem in text and fix in text


def test_a_full_device_is_not_taken_for_an_error_of_the_function() -> None:
    def full(tokens: LossTokens, options: dict[str, Any]) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        computed(tokens_of(0), full)

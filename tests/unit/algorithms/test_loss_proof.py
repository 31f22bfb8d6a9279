"""What is proved of a user's loss before a run starts, and how each failure is told."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loss_cases import clipped
from torch import Tensor

from offbeat.algorithms.custom_loss import CustomLoss, LossRefused
from offbeat.algorithms.loss_proof import prove_loss
from offbeat.algorithms.tokens import LossTokens
from offbeat.config.sections.loss import CustomLossConfig

Options = dict[str, Any]


def prove(function: Callable[..., Any], **settings: Any) -> None:
    config = CustomLossConfig(target="mine:loss", **settings)
    prove_loss(CustomLoss(function, "mine:loss"), config)


def plain(tokens: LossTokens, options: Options) -> Tensor:
    return -(tokens.logprobs_N - tokens.old_N).exp() * tokens.advantages_N


def by_sequence(tokens: LossTokens, options: Options) -> Tensor:
    """GSPO's ratio."""
    ones_N = torch.ones_like(tokens.logprobs_N)
    sums_S = tokens.sequence_sums(tokens.logprobs_N - tokens.old_N)
    ratio_S = (sums_S / tokens.sequence_sums(ones_N)).exp()
    return -ratio_S[tokens.sequence_N] * tokens.advantages_N


def gated(tokens: LossTokens, options: Options) -> tuple[Tensor, dict[str, Tensor]]:
    """A narrow trust region: outside, a token has no gradient."""
    gap_N = tokens.logprobs_N - tokens.old_N
    is_near_N = gap_N.detach().abs() < 1e-3
    return torch.where(is_near_N, plain(tokens, options), 0.0), {"near": is_near_N}


def to_reference(tokens: LossTokens, options: Options) -> Tensor:
    assert tokens.reference_N is not None
    return plain(tokens, options) + 0.1 * (tokens.logprobs_N - tokens.reference_N).square()


@pytest.mark.parametrize("old", ["generation", "policy", "current"])
@pytest.mark.parametrize("function", [plain, by_sequence, gated])
def test_losses_of_own_sequences_pass_with_every_old_policy(
    function: Callable[..., Any], old: str
) -> None:
    prove(function, old_logprobs=old)


def test_the_built_in_formula_passes_with_step_std() -> None:
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    prove(clipped, options=options, step_std=True)


def test_the_reference_is_there_if_the_recipe_asks_for_it() -> None:
    prove(to_reference, reference=True)
    prove(to_reference, kl_coef=0.1)
    with pytest.raises(LossRefused, match="AssertionError"):
        prove(to_reference)


calls = itertools.count()


def centred(tokens: LossTokens, options: Options) -> Tensor:
    return -tokens.logprobs_N * (tokens.advantages_N - tokens.advantages_N.mean())


def by_place(tokens: LossTokens, options: Options) -> Tensor:
    return plain(tokens, options) * (1 + tokens.sequence_N)


def in_place(tokens: LossTokens, options: Options) -> Tensor:
    tokens.advantages_N.mul_(0.5)
    return plain(tokens, options)


def in_options(tokens: LossTokens, options: Options) -> Tensor:
    options["calls"] = options.get("calls", 0) + 1
    return plain(tokens, options)


def showing_a_mean(tokens: LossTokens, options: Options) -> tuple[Tensor, dict[str, Tensor]]:
    loss_N = plain(tokens, options)
    return loss_N, {"relative": loss_N / loss_N.mean()}


def showing_by_size(tokens: LossTokens, options: Options) -> tuple[Tensor, dict[str, Tensor]]:
    loss_N = plain(tokens, options)
    return loss_N, {"long": loss_N} if len(loss_N) > 20 else {}


def broken_backward(tokens: LossTokens, options: Options) -> Tensor:
    ratio_N = (tokens.logprobs_N - tokens.old_N).exp()
    loss_N = ratio_N * ratio_N
    ratio_N.add_(1)
    return loss_N


@pytest.mark.parametrize(
    ("function", "problem", "fix"),
    [
        (lambda t, o: plain(t, o) / (t.old_N - t.old_N), "its loss of token 0 is -inf", "Clamp"),
        (lambda t, o: (t.logprobs_N - t.logprobs_N).sqrt(), "its gradient of token 0 is", "Clamp"),
        (lambda t, o: -t.advantages_N, "its loss has no gradient to logprobs_N", "detach()"),
        (lambda t, o: 0 * t.logprobs_N, "its gradient is 0 at each of", "detach()"),
        (centred, "in one call, but", "own sequence only"),
        (lambda t, o: plain(t, o) / len(t.mask_N), "with a call per sequence", "own sequence only"),
        (by_place, "with a call per sequence", "own sequence only"),
        (
            lambda t, o: plain(t, o) / torch.bincount(t.sequence_N)[t.sequence_N],
            "without the tokens that are not trained",
            "tokens.sequence_sums",
        ),
        (lambda t, o: plain(t, o) * torch.rand(len(t.mask_N)), "in a second call", "no random"),
        (lambda t, o: plain(t, o) * (1 + next(calls)), "in a second call", "no state"),
        (in_place, "changed its input advantages_N of token 0 from 1 to 0.5", "x = x * 2"),
        (in_options, "changed its options from {} to {'calls': 1}", "x = x * 2"),
        (showing_a_mean, "its value 'relative' of token", "own sequence only"),
        (showing_by_size, "it shows [\"value 'long'\"] in one call, but []", "own sequence only"),
        (broken_backward, "its backward pass raised", "x = x * 2"),
        (lambda t, o: plain(t, o).mean(), "the loss has shape []", "algorithm.loss.normalize"),
    ],
)
def test_a_loss_without_a_property_is_refused_with_figures_and_a_fix(
    function: Callable[..., Any], problem: str, fix: str
) -> None:
    with pytest.raises(LossRefused) as caught:
        prove(function)
    text = str(caught.value)
    assert text.startswith("algorithm.loss.target=mine:loss: ")
    assert problem in text and fix in text


def test_a_loss_that_depends_on_the_order_of_sequences_is_refused() -> None:
    def by_last(tokens: LossTokens, options: Options) -> Tensor:
        """The same alone and in the order of the proof, where the last sequence has advantage 7/3."""
        is_turned = tokens.sequences > 1 and tokens.advantages_N[-1] < tokens.advantages_N[0]
        return plain(tokens, options) * (1 + is_turned)

    with pytest.raises(LossRefused, match=r"in one call, but .* in a different order"):
        prove(by_last)


def test_step_std_needs_a_gradient_that_doubles_with_the_advantages() -> None:
    def squared(tokens: LossTokens, options: Options) -> Tensor:
        return plain(tokens, options) * tokens.advantages_N

    prove(squared)
    with pytest.raises(LossRefused, match="has to double with the advantages; that of token"):
        prove(squared, step_std=True)


def test_the_proof_leaves_the_random_state_as_it_was() -> None:
    before = copy.deepcopy(torch.get_rng_state())
    prove(plain)
    assert torch.equal(torch.get_rng_state(), before)

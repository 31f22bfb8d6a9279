"""Gradients against finite differences, where each bound does and does not hold."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from loss_cases import SPECS, keys_of, tokens_of
from torch import Tensor

from offbeat.algorithms.losses import LOSSES, LossTokens
from offbeat.config.sections.loss import ClippedPgLossConfig, LossConfig

REGIONS = {"on_policy": 0.0, "inside": 0.004, "below": -0.6, "above": 0.33, "dual": 0.9}
"""Log-ratios: inside every clip range; beyond the lower, the upper and the dual bound of each."""
LENGTHS = (2, 3) * 5 + (2,)
"""Two sequences for each region, and one without a valid token."""
smooth = pytest.mark.parametrize(
    "config", [pytest.param(each, id=name) for name, each in SPECS.items() if each.name != "cispo"]
)


def in_every_region(config: LossConfig) -> tuple[LossTokens, LossConfig, Tensor]:
    """Each region with advantages of both signs; and the log-ratio of each token.

    What has no gradient by intent must not move while a token is: old logprobs of the pass itself
    are given as a column.
    """
    drawn = tokens_of(4, LENGTHS)
    assert drawn.generation_N is not None
    log_ratio_S = torch.tensor([*REGIONS.values()] * 2 + [0.0], dtype=torch.float64)
    sign_S = torch.tensor([-1.0] * 5 + [1.0] * 6, dtype=torch.float64)
    log_ratio_N = log_ratio_S[drawn.sequence_N]
    tokens = replace(
        drawn,
        old_N=drawn.logprobs_N.detach() - log_ratio_N,
        generation_N=drawn.logprobs_N.detach() - log_ratio_N + 0.1 * drawn.generation_N.sin(),
        advantages_N=sign_S[drawn.sequence_N] * drawn.advantages_N.abs(),
    )
    if keys_of(config).old_logprobs == "current":
        config = config.model_copy(update={"old_logprobs": "policy"})
    return tokens, config, log_ratio_N


def loss_of(tokens: LossTokens, config: LossConfig) -> Callable[[Tensor], Tensor]:
    def loss(logprobs_N: Tensor) -> Tensor:
        return LOSSES[config.name](replace(tokens, logprobs_N=logprobs_N), config).loss

    return loss


@smooth
@pytest.mark.parametrize("masked", ["only_the_last", "some", "nan"])
def test_the_gradient_is_that_of_finite_differences(config: LossConfig, masked: str) -> None:
    tokens, config, _ = in_every_region(config)
    logprobs_N = tokens.logprobs_N.detach().clone()
    if masked == "only_the_last":
        tokens = replace(tokens, mask_N=tokens.sequence_N < len(LENGTHS) - 1)
    if masked == "nan":
        logprobs_N[~tokens.mask_N] = math.nan
    assert torch.autograd.gradcheck(loss_of(tokens, config), (logprobs_N.requires_grad_(),))


def test_a_region_is_where_it_says() -> None:
    config = ClippedPgLossConfig(clip_low=0.4, clip_high=0.35, dual_clip=2.0)
    tokens, config, log_ratio_N = in_every_region(config)
    sums = LOSSES[config.name](tokens, config)
    at_bound = {
        name: float(sums.metrics[f"train/clip_fraction_{name}"].value)
        for name in ("low", "high", "dual")
    }
    r, negative, valid = log_ratio_N.exp(), tokens.advantages_N < 0, tokens.mask_N
    assert at_bound == {
        "low": int((valid & negative & (r < 0.6)).sum()),
        "high": int((valid & ~negative & (r > 1.35)).sum()),
        "dual": int((valid & negative & (r > 2)).sum()),
    }
    assert min(at_bound.values()) > 0


@pytest.mark.parametrize("name", [name for name, each in SPECS.items() if each.name == "cispo"])
def test_cispo_is_the_gradient_of_its_weighted_logprobs(name: str) -> None:
    """With the weight as a number, which finite differences of its value would move."""
    config = SPECS[name].model_copy(
        update={
            "kl_coef": 0.0,
            "kl_reward_coef": 0.0,
            "entropy_coef": 0.0,
            "sequence_band": None,
            "sequence_cap": None,
        }
    )
    tokens, config, log_ratio_N = in_every_region(config)
    keys = keys_of(config)
    weight_N = log_ratio_N.exp().clamp(1 - keys.clip_low, 1 + keys.clip_high)
    LOSSES["cispo"](tokens, config).loss.backward()
    lengths = torch.zeros(len(LENGTHS), dtype=torch.float64)
    lengths = lengths.index_add(0, tokens.sequence_N, tokens.mask_N.double()).clamp(min=1)
    share_N = 1 / lengths[tokens.sequence_N] if config.normalize == "sequences" else 1.0
    want = torch.where(tokens.mask_N, -weight_N * tokens.advantages_N * share_N, 0.0)
    assert tokens.logprobs_N.grad is not None
    assert torch.allclose(tokens.logprobs_N.grad, want, rtol=1e-12, atol=0)

"""A preset's advantages, loss and divisor together, against its paper or library on padded matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from papers import PAPERS, PaddedBatch
from peers import PEERS
from torch import Tensor

from offbeat.algorithms.advantages import estimator
from offbeat.algorithms.divisors import denominator
from offbeat.algorithms.losses import LOSSES, LossTokens
from offbeat.config.presets import PRESETS
from offbeat.config.sections.algorithm import AlgorithmConfig
from offbeat.config.sections.loss import PolicyGradientLossConfig

PROMPTS, SAMPLES, BUDGET = 3, 4, 9
ONE_PASS = ("rloo", "tis", "icepop", "mis", "geo_mask", *PEERS)
"""Their old policy is the one being trained: each group is trained once."""


def drawn(name: str, seed: int) -> PaddedBatch:
    """Responses of different lengths, one prompt solved by all, and policies that differ."""
    rng = torch.Generator().manual_seed(seed)
    rows = PROMPTS * SAMPLES

    def normal(scale: float, *size: int) -> Tensor:
        return scale * torch.randn(*size, generator=rng, dtype=torch.float64)

    lengths = torch.randint(1, BUDGET + 1, (rows, 1), generator=rng)
    rewards = torch.randint(0, 2, (PROMPTS, SAMPLES), generator=rng).double()
    rewards[0], rewards[1, 0], rewards[1, 1] = 1.0, 0.0, 1.0
    scale = 1e-3 if name in ("gspo", "geo_mask") else 0.5
    mu = -2 + normal(0.5, rows, BUDGET)
    logp = (
        mu + normal(scale, rows, 1) * (6 if name == "geo_mask" else 1) + normal(scale, rows, BUDGET)
    )
    old = logp if name in ONE_PASS else mu + normal(1.2, rows, BUDGET)
    mask = (torch.arange(BUDGET) < lengths).double()
    ref = mu + normal(1.5, rows, BUDGET)
    return PaddedBatch(logp.requires_grad_(), old.detach(), mu, mask, ref, rewards, BUDGET)


def by_preset(name: str, b: PaddedBatch, calls: int) -> tuple[Tensor, Tensor]:
    """Loss and gradient [B, T] of the step, its rows spread over several calls."""
    config = AlgorithmConfig.model_validate({"preset": name})
    loss_config = config.loss.model_copy(update={"constant_tokens": b.budget})
    assert isinstance(loss_config, PolicyGradientLossConfig)
    advantage = estimator(config.advantage, pass_k=config.pass_k)
    groups = [advantage(tuple(each.tolist()), (True,) * len(each)) for each in b.rewards]
    rows = torch.tensor(groups, dtype=torch.float64).flatten()
    loss, parts = torch.zeros((), dtype=torch.float64), list[list[float]]()
    for own in torch.arange(len(rows)).chunk(calls):
        valid = b.mask[own] > 0
        flat = [each[own][valid] for each in (b.logp, b.old, b.mu, b.ref)]
        sequence = torch.arange(len(own))[:, None].expand_as(valid)[valid]
        tokens = LossTokens(
            logprobs_N=flat[0],
            old_N=flat[1] if loss_config.old_logprobs == "policy" else flat[2],
            generation_N=flat[2],
            reference_N=flat[3],
            advantages_N=rows[own][sequence],
            mask_N=torch.ones_like(sequence, dtype=torch.bool),
            sequence_N=sequence,
            sequences=len(own),
        )
        sums = LOSSES[loss_config.name](tokens, loss_config)
        loss = loss + sums.loss
        parts.append(sums.divisor.tolist())
    loss = loss / denominator(loss_config, parts)
    return loss.detach(), torch.autograd.grad(loss, b.logp)[0]


def test_every_preset_has_its_paper_or_library() -> None:
    assert PAPERS.keys() | PEERS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), calls=st.integers(1, 3))
def test_a_preset_is_what_its_paper_or_library_says(name: str, seed: int, calls: int) -> None:
    b = drawn(name, seed)
    want = (PAPERS | PEERS)[name](b)
    if not want.isfinite():  # every sequence was dropped: there is no such step
        return
    (gradient,) = torch.autograd.grad(want, b.logp)
    loss, got = by_preset(name, b, calls)
    assert torch.allclose(got, gradient, rtol=1e-9, atol=1e-13)
    if name != "rloo":  # its value is that of a ratio of 1, its gradient the same
        assert loss.item() == pytest.approx(want.item(), rel=1e-9, abs=1e-12)

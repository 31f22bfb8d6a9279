"""What a step is divided by: against plain loops, and against advantages divided beforehand."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import SPECS, expected, tokens_of

from offbeat.algorithms.divisors import STD_EPS, denominator
from offbeat.algorithms.losses import LOSSES, LossTokens
from offbeat.config.sections.loss import ClippedPgLossConfig, LossConfig

OF_ADVANTAGES = {name: each for name, each in SPECS.items() if each.name != "sft"}
every_loss = pytest.mark.parametrize("config", SPECS.values(), ids=SPECS)
seeds = st.integers(0, 10_000)
few = settings(max_examples=20)  # for each of the losses
KEPT = ClippedPgLossConfig(old_logprobs="policy", icepop_band=(0.9, 1.1), count_dropped=False)


def parts(tokens: LossTokens, config: LossConfig) -> list[float]:
    return LOSSES[config.name](tokens, config).divisor.tolist()


def step_gradient(tokens: LossTokens, config: LossConfig) -> torch.Tensor:
    """Of the logprobs, as the optimizer gets it."""
    sums = LOSSES[config.name](tokens, config)
    (made,) = torch.autograd.grad(sums.loss, tokens.logprobs_N)
    return made / denominator(config, [sums.divisor.tolist()])


@every_loss
@few
@given(seed=seeds)
def test_the_parts_are_those_of_plain_loops(config: LossConfig, seed: int) -> None:
    tokens = tokens_of(seed)
    want = expected(tokens, config)
    assert parts(tokens, config) == pytest.approx([want.units, want.samples, want.squares])


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (ClippedPgLossConfig(), 12.0),
        (ClippedPgLossConfig(normalize="sequences"), 12.0),
        (ClippedPgLossConfig(step_std=True), 12 * (2.5 + STD_EPS)),
    ],
)
def test_the_parts_of_a_step_add_up(config: LossConfig, want: float) -> None:
    told = [(5.0, 1.0, 6.0), (0.0, 0.0, 0.0), (7.0, 3.0, 19.0)]
    assert denominator(config, told) == pytest.approx(want, rel=1e-15)


@pytest.mark.parametrize("step_std", [False, True])
def test_a_step_of_nothing_is_divided_by_nothing(step_std: bool) -> None:
    assert denominator(ClippedPgLossConfig(step_std=step_std), []) == 0
    assert denominator(ClippedPgLossConfig(step_std=step_std), [(0.0, 0.0, 0.0)]) == 0


@pytest.mark.parametrize("config", OF_ADVANTAGES.values(), ids=OF_ADVANTAGES)
@few
@given(seed=seeds)
def test_dividing_at_the_end_is_dividing_the_advantages_before(
    config: LossConfig, seed: int
) -> None:
    tokens = tokens_of(seed)
    valid_S = torch.zeros(tokens.sequences).index_add(0, tokens.sequence_N, tokens.mask_N.float())
    firsts = torch.tensor([0, 3, 4, 9, 11])
    advantages_S = tokens.advantages_N[firsts][valid_S > 0]
    deviation = float(advantages_S.square().mean().sqrt())
    divided = replace(tokens, advantages_N=tokens.advantages_N / (deviation + STD_EPS))
    # None of these is in proportion to an advantage.
    off = {"kl_coef": 0.0, "kl_reward_coef": 0.0, "entropy_coef": 0.0}
    plain = config.model_copy(update=off)
    if LOSSES[config.name](tokens, plain).divisor[0] > 0:
        got = step_gradient(tokens, plain.model_copy(update={"step_std": True}))
        assert torch.allclose(got, step_gradient(divided, plain), rtol=1e-10, atol=1e-13)


def test_a_step_without_any_spread_of_advantages_moves_nothing() -> None:
    drawn = tokens_of(0)
    tokens = replace(drawn, advantages_N=torch.zeros_like(drawn.advantages_N))
    assert not step_gradient(tokens, ClippedPgLossConfig(step_std=True)).any()


def test_a_long_sequence_has_its_own_advantage_in_half_precision_too() -> None:
    drawn = tokens_of(0, (20_000, 1))
    drawn.mask_N[:20_000] = True
    tokens = replace(
        drawn,
        logprobs_N=drawn.logprobs_N.detach().bfloat16(),
        advantages_N=torch.full_like(drawn.advantages_N, 0.7, dtype=torch.float64),
    )
    assert parts(tokens, ClippedPgLossConfig())[2] == pytest.approx(0.49, rel=1e-6)


def test_short_answers_do_not_make_a_step_of_dr_grpo_stronger() -> None:
    """The bias that dividing by the step's tokens has."""

    def pull(length: int, config: LossConfig) -> float:
        drawn = tokens_of(0, (length, 1))
        mask = torch.arange(length + 1) < length
        same = torch.ones_like(drawn.advantages_N)
        tokens = replace(drawn, mask_N=mask, old_N=drawn.logprobs_N.detach(), advantages_N=same)
        return float(step_gradient(tokens, config)[0])

    constant = ClippedPgLossConfig(normalize="constant", constant_tokens=100)
    assert pull(5, constant) == pull(50, constant) == pytest.approx(-0.01)
    assert pull(5, ClippedPgLossConfig()) == pytest.approx(10 * pull(50, ClippedPgLossConfig()))


def test_a_constant_has_to_be_told() -> None:
    with pytest.raises(AssertionError, match="without constant_tokens"):
        parts(tokens_of(0), ClippedPgLossConfig(normalize="constant"))


@few
@given(seed=seeds)
def test_what_is_dropped_may_make_the_step_smaller_or_not(seed: int) -> None:
    """The same gradient, up to the number of tokens it is the mean of."""
    tokens = tokens_of(seed)
    counted = KEPT.model_copy(update={"count_dropped": True})
    valid, kept = parts(tokens, counted)[0], parts(tokens, KEPT)[0]
    assert valid == int(tokens.mask_N.sum()) >= kept
    if kept:
        small, whole = step_gradient(tokens, counted), step_gradient(tokens, KEPT)
        assert torch.allclose(small * valid, whole * kept, rtol=1e-12, atol=1e-15)


def test_the_worked_example_of_slimes_pr_657() -> None:
    """Ratios 1.11, 0.22, 2.23, 5e-5 and 1.35 in a band of [0.5, 2]: 2.46 over five tokens or two."""
    log_k = torch.tensor([0.1, -1.5, 0.8, -10.0, 0.3], dtype=torch.float64)
    zero = torch.zeros(5, dtype=torch.float64)
    tokens = LossTokens(
        logprobs_N=zero.clone().requires_grad_(),
        old_N=zero,
        generation_N=-log_k,
        reference_N=None,
        advantages_N=zero - 1,
        mask_N=torch.ones(5, dtype=torch.bool),
        sequence_N=torch.zeros(5, dtype=torch.int64),
        sequences=1,
    )
    for counts, want in ((True, 0.49), (False, 1.23)):
        config = KEPT.model_copy(update={"icepop_band": (0.5, 2.0), "count_dropped": counts})
        sums = LOSSES["clipped_pg"](tokens, config)
        got = sums.loss.item() / denominator(config, [sums.divisor.tolist()])
        assert got == pytest.approx(want, abs=0.005)

"""Long samples: masked one by one, or punished softly; nothing changes in an evaluation."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.sections.rollout import RolloutConfig
from offbeat.config.sections.sampler import FilterConfig
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.groups import Receipt, SampleStatus
from offbeat.rollouts.worker import by_length
from offbeat.sampler.filters import GroupFilter
from offbeat.transfer_queue import schema
from offbeat.transfer_queue.schema import Columns
from tests.support.environment_fakes import task

MASKED = RolloutConfig(truncated_samples="mask_loss")


def group(lengths: tuple[int, ...], reasons: tuple[str, ...]) -> tuple[Receipt, Columns]:
    samples = len(lengths)
    rewards = np.arange(samples, dtype=np.float32)
    columns: Columns = {
        schema.LOSS_MASK: np.ones(sum(lengths), dtype=np.bool_),
        schema.REWARDS: rewards,
    }
    receipt = make_receipt(
        7,
        1,
        tuple(((0, length),) for length in lengths),
        rewards=tuple(rewards.tolist()),
        finish_reasons=reasons,
        columns=tuple(columns),
    )
    return receipt, columns


def dapo(tokens: int, longest: int, stretch: int) -> float:
    """Equation 13 of arXiv:2503.14476."""
    if tokens <= longest - stretch:
        return 0.0
    if tokens <= longest:
        return ((longest - stretch) - tokens) / stretch
    return -1.0


def test_a_truncated_sample_trains_no_token_and_keeps_its_reward() -> None:
    receipt, columns = by_length(task(), *group((2, 3, 1), ("stop", "length", "stop")), MASKED, 0)
    assert columns[schema.LOSS_MASK].tolist() == [True, True, False, False, False, True]
    assert receipt.valid_tokens == (2, 0, 1)
    assert receipt.rewards == (0.0, 1.0, 2.0)
    assert receipt.valid == (True, True, True)
    assert receipt.truncated_samples == 1
    assert receipt.generated_tokens == (2, 3, 1), "metrics of length still see what it wrote"


def test_a_turn_that_was_cut_off_counts_as_the_end_of_its_sample_does() -> None:
    receipt, columns = group((2, 3), ("stop", "stop"))
    cut = msgspec.structs.replace(receipt, truncated_turns=(1, 0))
    receipt, _ = by_length(task(), cut, columns, MASKED, 0)
    assert receipt.valid_tokens == (0, 3)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 10), st.floats(0.1, 3))
def test_the_penalty_is_that_of_the_paper(lengths: list[int], stretch: int, weight: float) -> None:
    rollout = RolloutConfig(overlong_tokens=stretch, overlong_penalty=weight)
    made = group(tuple(lengths), ("stop",) * len(lengths))
    receipt, columns = by_length(task(), *made, rollout, 10)
    want = [i + weight * dapo(tokens, 10, stretch) for i, tokens in enumerate(lengths)]
    assert receipt.rewards == pytest.approx(want, rel=1e-6, abs=1e-6)
    assert receipt.rewards == tuple(columns[schema.REWARDS].tolist())
    assert columns[schema.REWARDS].dtype == np.float32
    ((name, penalties),) = receipt.rewards_by_name
    assert name == "overlong_penalty"
    assert penalties == pytest.approx([-weight * dapo(n, 10, stretch) for n in lengths])


def test_an_evaluation_is_scored_as_it_is() -> None:
    scored = msgspec.structs.replace(task(), evaluation=True)
    rollout = RolloutConfig(truncated_samples="mask_loss", overlong_tokens=2)
    made = group((2, 3), ("length", "length"))
    assert by_length(scored, *made, rollout, 3) == made


def test_a_sample_that_failed_is_neither_masked_again_nor_punished() -> None:
    receipt, columns = group((2, 3), ("length", "length"))
    statuses = (SampleStatus.VALID, SampleStatus.MASKED)
    failed = msgspec.structs.replace(receipt, statuses=statuses, valid_tokens=(2, 0))
    rollout = RolloutConfig(truncated_samples="mask_loss", overlong_tokens=3)
    receipt, _ = by_length(task(), failed, columns, rollout, 3)
    assert receipt.rewards == pytest.approx((-2 / 3, 1.0))
    assert receipt.valid_tokens == (0, 0)
    assert receipt.truncated == (True, False)


def test_a_group_of_which_every_sample_is_masked_is_replaced() -> None:
    receipt, _ = by_length(task(), *group((2, 3), ("length", "length")), MASKED, 0)
    assert GroupFilter(FilterConfig(), 1).refusal(receipt, 1) == "truncated"
    receipt, _ = by_length(task(), *group((2, 3), ("length", "stop")), MASKED, 0)
    assert GroupFilter(FilterConfig(), 1).refusal(receipt, 1) is None

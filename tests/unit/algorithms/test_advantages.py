import itertools
import math
import random
import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.algorithms.advantages import (
    ESTIMATORS,
    AdvantageEstimator,
    AdvantagesNotFinite,
    RewardsNotFinite,
    estimator,
)

every_estimator = pytest.mark.parametrize("name", [*sorted(ESTIMATORS), "pass_at_k"])
finite = st.floats(-1e3, 1e3).map(lambda value: round(value, 6))
groups = st.lists(finite, min_size=2, max_size=24).map(tuple)


def compared(advantage: AdvantageEstimator, rewards: tuple[float, ...]) -> tuple[float, ...]:
    """Of a group without a masked sample."""
    return advantage(rewards, (True,) * len(rewards))


def beside(reward: float, others: NDArray[np.float64]) -> float:
    """NeMo-RL's: the deviation of the others divides only where they have one."""
    differ = len(set(others.tolist())) > 1
    return float((reward - np.mean(others)) / (np.std(others, ddof=1) + 1e-6 if differ else 1.0))


def reference(
    name: str, rewards: tuple[float, ...], valid: tuple[bool, ...], k: int
) -> list[float]:
    """Each formula in loops over the valid samples, in float64."""
    counted = [i for i in range(len(rewards)) if valid[i]]
    r = np.array(rewards, np.float64)
    advantages = np.zeros(len(rewards), np.float64)
    if len({rewards[i] for i in counted}) < 2:
        return advantages.tolist()
    mean = sum(r[i] for i in counted) / len(counted)
    variance = sum((r[i] - mean) ** 2 for i in counted) / (len(counted) - 1)
    k = min(k, len(counted) - 1)
    tries = list(itertools.combinations(counted, k))
    for i in counted:
        others = [r[j] for j in counted if j != i]
        with_i = [max(r[j] for j in each) for each in tries if i in each]
        without_i = [max(r[j] for j in each) for each in tries if i not in each]
        match name:
            case "grpo":
                advantages[i] = (r[i] - mean) / (np.sqrt(variance) + 1e-6)
            case "grpo_loo":
                advantages[i] = beside(r[i], np.array(others))
            case "rloo":
                advantages[i] = r[i] - sum(others) / len(others)
            case "pass_at_k":
                advantages[i] = k * (np.mean(with_i) - np.mean(without_i))
            case _:
                advantages[i] = r[i] - mean
    return advantages.tolist()


@every_estimator
@given(
    samples=st.lists(st.tuples(finite, st.booleans()), min_size=1, max_size=8),
    unread=st.sampled_from([0.0, 1e6, math.nan, math.inf]),
    k=st.integers(1, 7),
)
def test_a_masked_sample_has_no_part_in_mean_or_deviation_and_its_reward_is_not_read(
    name: str, samples: list[tuple[float, bool]], unread: float, k: int
) -> None:
    valid = tuple(counts for _, counts in samples)
    rewards = tuple(reward if counts else unread for reward, counts in samples)
    got = estimator(name, pass_k=k)(rewards, valid)
    want = reference(name, rewards, valid, k)
    assert got == pytest.approx(want, rel=1e-9, abs=1e-7)
    assert all(a == 0.0 for a, counts in zip(got, valid, strict=True) if not counts)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(reward=finite, samples=st.integers(0, 9))
def test_equal_rewards_give_exact_zeros(name: str, reward: float, samples: int) -> None:
    assert compared(ESTIMATORS[name], (reward,) * samples) == (0.0,) * samples


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_estimates_the_gradient_of_the_best_of_k_without_bias(k: int) -> None:
    """Over all groups of four draws from three outcomes, against the derivative worked out."""
    outcomes, logits, size = (0.0, 1.0, 0.25), np.array([0.3, -1.0, 0.2]), 4
    p = np.exp(logits) / np.exp(logits).sum()
    advantage, estimate = estimator("pass_at_k", pass_k=k), np.zeros(3)
    for draws in itertools.product(range(3), repeat=size):
        chance = np.prod(p[list(draws)])
        for draw, a in zip(
            draws, compared(advantage, tuple(outcomes[d] for d in draws)), strict=True
        ):
            estimate += chance * a / size * (np.eye(3)[draw] - p)

    def best(theta: np.ndarray) -> float:
        q = np.exp(theta) / np.exp(theta).sum()
        tries = itertools.product(range(3), repeat=k)
        return float(sum(np.prod(q[list(t)]) * max(outcomes[d] for d in t) for t in tries))

    step = 1e-6 * np.eye(3)
    slope = [(best(logits + each) - best(logits - each)) / 2e-6 for each in step]
    assert estimate.tolist() == pytest.approx(slope, abs=1e-8)


def test_a_lone_success_is_worth_more_to_two_tries_than_one_of_three() -> None:
    solved, hard = (1.0, 1.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0)
    best_of = estimator("pass_at_k", pass_k=2)
    assert compared(best_of, hard)[0] == pytest.approx(2.0)
    assert compared(best_of, solved)[0] == pytest.approx(0.0)
    assert compared(ESTIMATORS["rloo"], solved)[0] == pytest.approx(1 / 3)


def test_estimators_are_found_by_name() -> None:
    for name, each in ESTIMATORS.items():
        assert estimator(name, pass_k=3) is each
    best_of = estimator("pass_at_k", pass_k=3)
    assert best_of.name == "pass_at_k"
    assert compared(best_of, (0.5,)) == (0.0,)
    assert compared(best_of, (0.5,) * 4) == (0.0,) * 4


def test_a_large_group_is_no_trouble() -> None:
    rewards = tuple(float(i % 7) for i in range(512))
    assert sum(compared(estimator("pass_at_k", pass_k=256), rewards)) == pytest.approx(0, abs=1e-6)


def test_every_estimator_has_the_name_under_which_it_is_found() -> None:
    assert all(name == each.name for name, each in ESTIMATORS.items())


def test_the_controller_can_import_advantages_without_torch_or_numpy() -> None:
    code = (
        "import sys, offbeat.algorithms.advantages; "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@every_estimator
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.5e38])
@pytest.mark.parametrize("others", [(), (1.0, 2.0), (math.inf,)])
def test_a_reward_that_is_no_float32_is_refused_by_name(
    name: str, bad: float, others: tuple[float, ...]
) -> None:
    with pytest.raises(RewardsNotFinite, match=f"{name} cannot compare .* samples .*0"):
        compared(estimator(name, pass_k=2), (bad, *others))


def test_the_refusal_names_the_samples() -> None:
    assert "samples [1]" in str(RewardsNotFinite("grpo", (1.0, math.nan)))


@every_estimator
def test_the_largest_rewards_there_are_stay_finite_or_are_refused_by_name(name: str) -> None:
    advantage = estimator(name, pass_k=2)
    for rewards in ((3.4e38, -3.4e38, 3.4e38, 1.0), (3.4e38, -3.4e38, -3.4e38, -3.4e38)):
        try:
            got = compared(advantage, rewards)
        except AdvantagesNotFinite:
            continue
        assert np.isfinite(np.array(got, np.float32)).all()
        assert got[0] > 0 > got[1]


@pytest.mark.parametrize("name", ["rloo", "pass_at_k", "dr_grpo"])
def test_advantages_beyond_float32_are_refused(name: str) -> None:
    with pytest.raises(AdvantagesNotFinite, match="Divide the rewards by a constant"):
        compared(estimator(name, pass_k=2), (3.4e38, -3.4e38, -3.4e38, -3.4e38))


@every_estimator
@given(rewards=groups, seed=st.randoms(use_true_random=False))
def test_samples_have_no_order(name: str, rewards: tuple[float, ...], seed: random.Random) -> None:
    order = list(range(len(rewards)))
    seed.shuffle(order)
    advantage = estimator(name, pass_k=3)
    want = compared(advantage, rewards)
    got = compared(advantage, tuple(rewards[i] for i in order))
    assert got == pytest.approx([want[i] for i in order], rel=1e-9, abs=1e-7)


@every_estimator
@given(rewards=groups, shift=st.integers(-100, 100), scale=st.sampled_from([0.5, 2.0, 16.0]))
def test_only_differences_of_rewards_count(
    name: str, rewards: tuple[float, ...], shift: int, scale: float
) -> None:
    advantage = estimator(name, pass_k=2)
    want = compared(advantage, rewards)
    moved = compared(advantage, tuple(scale * r + shift for r in rewards))
    if name == "grpo_loo":
        others = [rewards[:place] + rewards[place + 1 :] for place in range(len(rewards))]
        if all(len(set(each)) == 1 or statistics.stdev(each) > 0.1 for each in others):
            scales = [scale if len(set(each)) == 1 else 1.0 for each in others]
            scaled = [factor * a for factor, a in zip(scales, want, strict=True)]
            assert moved == pytest.approx(scaled, rel=1e-4, abs=1e-6)
    elif name != "grpo":
        assert moved == pytest.approx([scale * a for a in want], rel=1e-6, abs=1e-6)
    elif statistics.pstdev(rewards) > 0.1:  # far enough from the constant beside the deviation
        assert moved == pytest.approx(want, rel=1e-4, abs=1e-6)

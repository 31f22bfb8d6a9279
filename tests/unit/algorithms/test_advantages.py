import statistics
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.algorithms.advantages import ESTIMATORS

finite = st.floats(-1e3, 1e3).map(lambda value: round(value, 6))
groups = st.lists(finite, min_size=2, max_size=24).map(tuple)


def reference(name: str, rewards: tuple[float, ...]) -> list[float]:
    """Each formula again, in numpy and written from its paper."""
    r = np.asarray(rewards, np.float64)
    if name == "grpo":
        return ((r - np.mean(r)) / (np.std(r, ddof=1) + 1e-6)).tolist()
    if name == "rloo":
        return [float(r[i] - np.delete(r, i).mean()) for i in range(len(r))]
    return (r - np.mean(r)).tolist()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(rewards=groups)
def test_every_estimator_is_its_formula(name: str, rewards: tuple[float, ...]) -> None:
    if len(set(rewards)) > 1:
        want = reference(name, rewards)
        assert ESTIMATORS[name](rewards) == pytest.approx(want, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(reward=finite, samples=st.integers(0, 9))
def test_equal_rewards_give_exact_zeros(name: str, reward: float, samples: int) -> None:
    assert ESTIMATORS[name]((reward,) * samples) == (0.0,) * samples


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_sample_alone_has_nothing_to_be_compared_with(name: str) -> None:
    assert ESTIMATORS[name]((3.5,)) == (0.0,)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(rewards=groups)
def test_advantages_of_a_group_cancel(name: str, rewards: tuple[float, ...]) -> None:
    assert sum(ESTIMATORS[name](rewards)) == pytest.approx(0, abs=1e-6)


def test_known_values() -> None:
    rewards = (1.0, 0.0, 0.0, 1.0)
    assert ESTIMATORS["grpo_no_std"](rewards) == (0.5, -0.5, -0.5, 0.5)
    assert ESTIMATORS["dr_grpo"](rewards) == (0.5, -0.5, -0.5, 0.5)
    assert ESTIMATORS["rloo"](rewards) == pytest.approx((2 / 3, -2 / 3, -2 / 3, 2 / 3))
    assert ESTIMATORS["grpo"](rewards)[0] == pytest.approx(0.5 / (statistics.stdev(rewards) + 1e-6))


def test_every_estimator_needs_only_what_receipts_carry() -> None:
    assert {each.needs for each in ESTIMATORS.values()} == {"tags"}
    assert all(name == each.name for name, each in ESTIMATORS.items())


def test_the_controller_can_import_advantages_without_torch_or_numpy() -> None:
    code = (
        "import sys, offbeat.algorithms.advantages; "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

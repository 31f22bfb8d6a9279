"""An advantage of the user's own: a function of a group's rewards, tried before the run."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.algorithms.advantages import ESTIMATORS
from offbeat.algorithms.custom_advantage import AdvantageRefused, load_estimator
from offbeat.config.by_value import give
from offbeat.config.sections.algorithm import AlgorithmConfig

Rewards = tuple[float, ...]


def loaded(function: Callable[..., Any] | str, folder: Path = Path()) -> Any:
    target = function if isinstance(function, str) else give(function)
    return load_estimator(AlgorithmConfig.model_validate({"advantage": target}), folder)


def centred(rewards: Rewards) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [each - mean for each in rewards]


def test_a_function_is_an_estimator_with_the_rules_of_the_built_in_ones(tmp_path: Path) -> None:
    (tmp_path / "my_advantages.py").write_text(
        "def centred(rewards):\n"
        "    mean = sum(rewards) / len(rewards)\n"
        "    return [each - mean for each in rewards]\n"
    )
    for own in (loaded(centred), loaded("my_advantages:centred", tmp_path)):
        for rewards in ((0.0, 1.0, 5.0), (2.0, 2.0), (3.0,)):
            valid = (True,) * len(rewards)
            assert own(rewards, valid) == ESTIMATORS["grpo_no_std"](rewards, valid)
        assert own((1.0, 9.0, 3.0), (True, False, True)) == (-1.0, 0.0, 1.0)


def test_an_array_of_numpy_is_a_result() -> None:
    own = loaded(lambda rewards: np.asarray(rewards) - np.mean(rewards))
    assert own((0.0, 1.0), (True, True)) == (-0.5, 0.5)


def test_names_of_the_package_are_its_estimators() -> None:
    assert load_estimator(AlgorithmConfig(), Path()) is ESTIMATORS["grpo"]


calls = itertools.count()


@pytest.mark.parametrize(
    ("function", "problem", "fix"),
    [
        (lambda rewards: 1.0, "it returned 1.0 for the rewards (0.0, 1.0)", "one finite number"),
        (lambda rewards: None, "it returned None for the rewards", "one finite number"),
        (lambda rewards: rewards[1:], "it returned (1.0,) for the rewards", "for each reward"),
        (lambda rewards: ["a" for _ in rewards], "it returned ['a', 'a']", "one finite number"),
        (lambda rewards: [float("nan")] * len(rewards), "it returned (nan, nan)", "one finite"),
        (lambda rewards: [1 / each for each in rewards], "ZeroDivisionError", "Repair"),
        (lambda rewards: [next(calls) for _ in rewards], "and then (2.0, 3.0)", "no state"),
        (lambda rewards: [*range(len(rewards))], "in the opposite order", "not from its place"),
    ],
)
def test_any_other_function_is_refused_with_what_came_back_and_the_fix(
    function: Callable[..., Any], problem: str, fix: str
) -> None:
    with pytest.raises(AdvantageRefused) as caught:
        loaded(function)
    text = str(caught.value)
    assert text.startswith("algorithm.advantage=offbeat.by_value:")
    assert problem in text and fix in text


def test_a_result_is_looked_at_in_every_group() -> None:
    own = loaded(lambda rewards: centred(rewards) if max(rewards) < 1000 else rewards[:1])
    with pytest.raises(AdvantageRefused, match=r"it returned \(1000\.0,\) for the rewards"):
        own((1000.0, 0.0), (True, True))


def test_a_target_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdvantageRefused, match="no module my_absent_advantages from"):
        loaded("my_absent_advantages:f", tmp_path)


def test_it_needs_no_torch() -> None:
    code = "import sys, offbeat.algorithms.custom_advantage; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"

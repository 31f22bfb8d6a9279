"""mean@k, pass@k and maj@k of an evaluation, with their standard errors."""

import math
import statistics
from itertools import combinations, product

import pytest

from offbeat.algorithms.eval_scores import majority_score, pass_at_k, scores_by_set
from offbeat.messages.evaluations import ScoredSample


def sample(prompt: int, number: int, reward: float, **other: object) -> ScoredSample:
    fields = {
        "set": "math",
        "row": prompt,
        "is_valid": True,
        "is_correct": reward >= 1.0,
        "answer": None,
        "finish_reason": "stop",
        "response_tokens": 4,
        "turns": 1,
    }
    return ScoredSample(
        **{**fields, "prompt_index": prompt, "sample": number, "reward": reward, **other}
    )


def rewarded(*prompts: tuple[float, ...]) -> list[ScoredSample]:
    return [
        sample(prompt, number, reward)
        for prompt, rewards in enumerate(prompts)
        for number, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_correct_sample(n: int) -> None:
    for c, k in product(range(n + 1), range(1, n + 1)):
        draws = list(combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(
    ("answers", "correct", "score"),
    [
        (["5", "5", "7"], [True, True, False], 1.0),
        (["7", "7", "5"], [False, False, True], 0.0),
        (["5", "7"], [True, False], 0.5),  # a tie: either way
        (["", "", "5"], [False, False, True], 1.0),  # no answer, no vote
        (["", ""], [True, True], 0.0),
        (["5", "5"], [True, False], 0.5),  # one answer that is right in one form only
    ],
)
def test_the_majority_of_the_answers_decides(
    answers: list[str], correct: list[bool], score: float
) -> None:
    assert majority_score(answers, correct) == score


def test_scores_are_means_over_prompts_with_their_standard_error() -> None:
    scores = scores_by_set(rewarded((1.0, 1.0), (1.0, 0.0), (0.0, 0.0)))["math"]
    assert (scores.prompts, scores.samples, scores.k) == (3, 6, 2)
    assert scores.mean.value == 0.5
    assert scores.mean.error == pytest.approx(statistics.stdev([1.0, 0.5, 0.0]) / math.sqrt(3))
    assert {k: each.value for k, each in scores.pass_at.items()} == {
        1: 0.5,
        2: pytest.approx(2 / 3),
    }
    assert scores.majority is None


def test_a_prompt_without_any_answer_counts_in_the_majority_as_wrong() -> None:
    samples = [
        sample(0, 0, 1.0, answer="7"),
        sample(0, 1, 1.0, answer="7"),
        *rewarded((0.0, 0.0), (1.0, 1.0))[2:],
    ]
    majority = scores_by_set(samples)["math"].majority
    assert majority is not None and majority.value == 0.5


def test_one_prompt_has_no_standard_error() -> None:
    assert scores_by_set(rewarded((1.0, 0.0)))["math"].mean.error is None


def test_pass_at_k_is_told_of_powers_of_two_and_of_all_samples() -> None:
    assert list(scores_by_set(rewarded((1.0,) * 6))["math"].pass_at) == [1, 2, 4, 6]


def test_a_set_without_a_valid_sample_has_no_score() -> None:
    masked = [sample(0, number, 0.0, is_valid=False) for number in range(2)]
    assert scores_by_set(masked) == {}


def test_a_masked_sample_counts_in_no_score() -> None:
    masked = sample(0, 2, 0.0, is_valid=False)
    scores = scores_by_set([*rewarded((1.0, 1.0), (1.0, 1.0, 0.0)), masked])["math"]
    assert (scores.samples, scores.masked_samples, scores.k) == (5, 1, 3)
    assert scores.mean.value == pytest.approx((1.0 + 2 / 3) / 2)
    assert scores.pass_at[3].value == 1.0  # of the second prompt: the first has too few


def test_each_set_has_its_own_scores() -> None:
    both = [sample(0, 0, 1.0), sample(0, 0, 0.0, set="code")]
    means = {name: scores.mean.value for name, scores in scores_by_set(both).items()}
    assert means == {"math": 1.0, "code": 0.0}

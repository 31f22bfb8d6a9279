"""Forms of a reward that is given by value: what cannot be called with a row and a response is refused."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.by_value import give
from offbeat.config.run import RunConfig
from offbeat.launch.checks.user_code import check_targets
from offbeat.messages.finding import Finding, Level

Row = Mapping[str, Any]


def findings(reward: Callable[..., Any], row: dict[str, Any] | None = None) -> list[Finding]:
    environment = {"name": "function", "target": give(reward)}
    recipe = RunConfig.model_validate(
        {"steps": 1, "model": {"path": "nowhere"}, "data": {"path": "rows.jsonl"},
         "environment": environment}
    )  # fmt: skip
    return list(check_targets(recipe, Path.cwd(), row))


class OfTrl:
    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [0.0 for _ in completions]


class Grader:
    def __init__(self, right: float = 1.0) -> None:
        self.right = right

    def __call__(self, row: Row, response: str) -> float:
        return self.right * (response == row["answer"])

    def score(self, row: Row, response: str) -> float:
        return self(row, response)


def of_trl(completions: list[str], solution: list[str], **_: object) -> list[float]:
    return [float(a == b) for a, b in zip(completions, solution, strict=True)]


def of_batch(prompts: Any, completions: Any, **_: Any) -> Any:
    return [0.0 for _ in completions]


def as_list(row: Row, response: str) -> list[float]:
    return [float(response == row["answer"])]


def by_keyword(*, row: Row, response: str) -> float:
    return float(response == row["answer"])


def with_answer(row: Row, response: str, answer: str) -> float:
    return float(response == answer)


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (OfTrl(), "OfTrl() rewards a batch, as in TRL"),
        (of_trl, "return of_trl(completions=[response], solution=[row['solution']])[0]"),
        (of_batch, 'return of_batch(prompts=[row["prompt"]], completions=[response])[0]'),
        (as_list, "returns a list, but a reward returns one number for one response"),
        (lambda response: 0.0, "takes 1 positional argument; a reward gets a row and a response"),
        (len, "len() takes 1 positional argument; a reward gets a row and a response"),
        (by_keyword, "takes 0 positional arguments; a reward gets a row and a response"),
        (Grader, "Grader is a class: calling it returns no number"),
        (with_answer, "needs 'answer': use row['answer'] if the row has this key"),
    ],
)  # fmt: skip
def test_a_reward_that_gets_no_row_and_response_is_refused_with_the_fix(
    reward: Callable[..., Any], problem: str
) -> None:
    (found,) = findings(reward)
    assert found.level is Level.ERROR
    assert problem in found.message
    assert "Give an instance" in found.fix or "def reward(row, response)" in found.fix


def collected(prompts: list[str], completions: list[str]):  # noqa: ANN201 - as people write it
    scores: list[float] = []
    scores.extend(len(each) for each in completions)
    return scores


def comprehended(prompts: list[str], completions: list[str]):  # noqa: ANN201
    return [0.0 for _ in completions]


class Batched:
    def __call__(self, prompts: list[str], completions: list[str]):  # noqa: ANN204
        return collected(prompts, completions)

    def score(self, prompts: list[str], completions: list[str]):  # noqa: ANN201
        return [0.0 for _ in completions]


@pytest.mark.parametrize("reward", [collected, comprehended, Batched(), Batched().score])
def test_a_reward_of_a_batch_that_returns_a_list_is_refused(reward: Callable[..., Any]) -> None:
    refused = findings(reward, {"prompt": "1+1="})[-1]
    assert refused.level is Level.ERROR
    assert "the reward is list []; return a float" in refused.message
    assert "def reward(row, response)" in refused.fix


def swapped(completion: str, answer: Row) -> float:
    return float(completion == str(answer))


def test_a_reward_whose_first_argument_is_called_a_completion_is_refused() -> None:
    refused = findings(swapped)[-1]
    assert refused.level is Level.ERROR
    assert "is called completion, but it gets the row" in refused.message
    assert "def reward(row, response)" in refused.fix


def one_of_each(prompts: Row, completions: str) -> float:
    return float(len(completions) - len(prompts))


async def asynchronous(row: Row, response: str, weight: float = 1.0) -> float:
    return weight


class Scored(dict[str, float]):
    """The reward of a sample and its answer."""

    def __init__(self, row: Row, response: str) -> None:
        super().__init__(reward=float(response == row["answer"]))


@pytest.mark.parametrize(
    "reward",
    [
        Grader(),
        Grader().score,
        functools.partial(with_answer, answer="7"),
        lambda row, response: 1.0,
        lambda *both: 1.0,
        asynchronous,
        one_of_each,
        Scored,
        max,
    ],
)
def test_a_reward_that_works_is_not_refused(reward: Callable[..., Any]) -> None:
    assert all(each.level is not Level.ERROR for each in findings(reward))

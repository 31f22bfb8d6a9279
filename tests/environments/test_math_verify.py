"""The built-in reward ``math_verify``. Skipped without its package: ``make test-environments``."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.graders import GRADERS
from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.factory import make_environment
from offbeat.environments.function_reward import FunctionReward
from offbeat.messages.failures import RolloutFailed
from tests.support.environment_fakes import CharTokenizer, OpensThought, result, task

pytest.importorskip("math_verify", reason="the extra math is not installed")

from offbeat.environments.math_answer import math_reward

pytestmark = pytest.mark.environments

HALF = {"prompt": "?", "answer": r"\frac{1}{2}"}


def rewards(row: dict[str, Any], *texts: str) -> list[float]:
    return [math_reward(row, text) for text in texts]


def test_the_same_value_is_right_in_whatever_form_it_is_written() -> None:
    right = (
        "0.5",
        "so it is 1/2.",
        r"$\frac{2}{4}$",
        r"\boxed{\frac12}",
        r"<think>3</think>\(0.5\)",
    )
    assert rewards(HALF, *right) == [1.0] * len(right)


def test_another_value_or_none_is_wrong() -> None:
    wrong = (
        "0.25",
        "",
        "a half",
        r"\boxed{}",
        "<think>0.5",
        r"$\frac{1}{$",
        "$" * 2000,
        "(" * 2000,
    )
    assert rewards(HALF, *wrong) == [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("answer", "response"),
    [(72, "72"), (1.5, r"$\frac{3}{2}$"), ("x^2+1", "$1+x^2$"), ("1,234", "1234"), ("$5$", "5")],
)
def test_the_answer_of_a_row_is_a_number_or_latex_with_or_without_marks(
    answer: object, response: str
) -> None:
    assert rewards({"answer": answer}, response, "7 or 8") == [1.0, 0.0]


def test_a_row_whose_answer_nothing_can_read_raises_instead_of_calling_every_response_wrong() -> (
    None
):
    with pytest.raises(ValueError, match=r"reads no answer in answer='\\\\boxed\{\}'"):
        math_reward({"answer": r"\boxed{}"}, "5")


def scored(
    row: dict[str, Any], *texts: str, tokenizer: CharTokenizer | None = None, **section: Any
) -> list[object]:
    """The reward of each text in a group of its own, or the reason why it has none."""

    async def story() -> list[object]:
        config = EnvironmentConfig(name="function", target="math_verify", **section)
        environment = make_environment(config, tokenizer or CharTokenizer(), Path(__file__).parent)
        assert isinstance(environment, FunctionReward)
        await environment.start()
        outcomes = list[object]()
        for text in texts:
            try:
                (reward,) = await environment.score(task(row, samples=1), result("r", [text]))
            except RolloutFailed as failure:
                outcomes.append(f"{failure.kind}: {failure.reason}")
            else:
                outcomes.append(reward.reward)
        await environment.close()
        return outcomes

    return asyncio.run(story())


def test_an_answer_that_takes_too_long_is_a_failure_by_name_and_the_next_one_is_graded() -> None:
    tower, nested = "$9^{9^{9^{9}}}$", "$" + "(" * 3000 + "1" + ")" * 3000 + "$"
    outcomes = scored(HALF, "0.5", tower, "0.5", nested, "0.25", reward_deadline_s=2.0)
    assert outcomes == [1.0, "data: reward_deadline", 1.0, "data: reward_deadline", 0.0]


def test_no_timeout_of_the_library_stands_between_an_answer_and_its_deadline() -> None:
    # Its timeouts are signals, which a thread cannot set: with one of them on, this raises.
    assert asyncio.run(asyncio.to_thread(math_reward, HALF, "0.5")) == 1.0


def test_a_thought_that_the_chat_template_opened_is_no_answer_until_it_is_closed() -> None:
    """A sample that was cut off while it thinks has guessed, and not answered."""
    asked = {"messages": [{"role": "user", "content": "?"}], "answer": "0.5"}
    texts = (r"perhaps \boxed{0.5}", r"perhaps \boxed{3}</think>\boxed{0.5}", r"</think>3")
    assert scored(asked, *texts, tokenizer=OpensThought()) == [0.0, 1.0, 0.0]
    assert scored({"prompt": "? <think>", "answer": "0.5"}, "0.5", "</think>0.5") == [0.0, 1.0]
    assert scored(asked, "0.5") == [1.0]


def test_options_reach_the_grader() -> None:
    assert scored(
        {"prompt": "?", "gold": 3}, "3", options={"answer_key": "gold", "correct": 2.0}
    ) == [2.0]


def test_the_grader_is_where_its_name_says() -> None:
    assert GRADERS["math_verify"].target == f"{math_reward.__module__}:{math_reward.__name__}"

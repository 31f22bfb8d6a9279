"""Tasks of reasoning-gym. Skipped without the package: ``make test-environments``."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.run import RunConfig
from offbeat.environments.factory import make_environment, make_prompts
from offbeat.messages.groups import Prompt
from offbeat.plugins.task_libraries.gym_tasks import (
    GymOptions,
    GymUnusable,
    ReasoningGym,
    find_item,
    make_items,
)
from tests.support.environment_fakes import CharTokenizer, OpensThought, result, task

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")

pytestmark = [pytest.mark.environments, pytest.mark.filterwarnings("default")]

DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SUMS = {"task": "chain_sum", "parameters": DIGITS, "question": "{expression} =", "chat": False}


def run_config(seed: int = 0, **options: Any) -> RunConfig:
    section = {"name": "reasoning_gym", "options": SUMS | options}
    return RunConfig.model_validate(
        {"steps": 1, "seed": seed, "model": {"path": "tiny"}, "environment": section}
    )


def environment(tokenizer: CharTokenizer | None = None, **options: Any) -> ReasoningGym:
    section = run_config(**options).environment
    made = make_environment(section, tokenizer or CharTokenizer(), Path(__file__).parent)
    assert isinstance(made, ReasoningGym)
    return made


def prompt(index: int, seed: int = 0) -> Prompt:
    found = make_prompts(run_config(seed)).prompt(index)
    assert found is not None
    return found


def question(index: int, seed: int = 0, **options: Any) -> str:
    return CharTokenizer().decode(environment(**options).encode(prompt(index, seed)))


def test_a_question_depends_on_the_seed_and_the_prompt_index_alone() -> None:
    assert [question(index) for index in (3, 0, 3)] == ["9 + 3 =", "3 - 4 =", "9 + 3 ="]
    assert question(3, seed=1) != question(3)
    assert question(3, rows=10_000, threshold=0.5) == question(3)


def test_questions_are_asked_as_the_library_words_them_through_the_chat_template() -> None:
    asked = question(3, question="{question}", chat=True)
    assert (
        asked
        == "user:State the final answer to the following arithmetic problem: 9 + 3 =;assistant:"
    )


def scored(*texts: str, tokenizer: CharTokenizer | None = None, **options: Any) -> list[Any]:
    async def story() -> list[Any]:
        gym = environment(tokenizer, **options)
        await gym.start()
        row = prompt(3).data
        rewards = await gym.score(task(row, samples=len(texts)), result("r", texts))
        await gym.close()
        return [each.reward for each in rewards]

    return asyncio.run(story())


def test_the_right_answer_is_a_reward_of_one_and_what_the_library_gives_for_verbosity_is_none() -> (
    None
):
    texts = ("12", " 12\n", "<think>1</think><answer>12</answer>", "it is 12", "6", "")
    assert scored(*texts) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_thought_that_the_chat_template_opened_is_no_answer_until_it_is_closed() -> None:
    texts = ("12", "<answer>12</answer>", "it is 12</think>12")
    assert scored(*texts, tokenizer=OpensThought(), chat=True) == [0.0, 0.0, 1.0]
    assert scored(*texts, chat=True) == [1.0, 1.0, 1.0]


def test_scores_are_rewards_as_they_are_without_a_threshold() -> None:
    right, verbose, wrong = scored("12", "it is 12", "5", threshold=None)
    assert right == 1.0
    assert 0.0 < verbose < 0.5
    assert wrong == 0.0


def test_an_unknown_task_is_told_with_the_names_there_are() -> None:
    with pytest.raises(GymUnusable, match=r"no task has this name; there are .*, chain_sum, .*"):
        make_items(GymOptions("chain_sums"), 0)


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [({"terms": 2}, "unexpected keyword"), ({"min_terms": 9, "max_terms": 2}, "max_terms must be")],
)
def test_parameters_that_do_not_fit_are_told(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(GymUnusable, match=rf"options\.parameters: .*{problem}"):
        make_items(GymOptions("chain_sum", parameters), 0)


def test_a_field_that_no_item_has_is_told_with_those_there_are() -> None:
    options = GymOptions("chain_sum", question="{expresion}")
    with pytest.raises(GymUnusable, match=r"'expresion'.*its fields are .*expression"):
        options.get_question(find_item(options, {"seed": 0, "item": 0}))

import asyncio
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.run import RunConfig
from offbeat.config.sections.data import DataConfig
from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.config.sections.eval import EvalConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.environments.factory import (
    BadEnvironment,
    make_environment,
    make_evaluation_sets,
    make_prompts,
)
from offbeat.environments.gsm8k import Gsm8k, Gsm8kOptions, NoChatTemplate
from offbeat.environments.prompt_files import PromptFileError
from offbeat.messages.groups import Prompt
from tests.support.environment_fakes import (
    CharTokenizer,
    OpensThought,
    PartsTokenizer,
    result,
    task,
)

ROW = {"question": "A box of 6 rows of 12?", "answer": "6 * 12 = 72\n#### 72"}


class NoTemplate(CharTokenizer):
    """As a base model's."""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        raise ValueError("tokenizer.chat_template is not set")


def rewards(
    *texts: str, tokenizer: CharTokenizer | None = None, finish: str = "stop", **options: Any
) -> list[float]:
    environment = Gsm8k(tokenizer or CharTokenizer(), Gsm8kOptions(**options))
    scored = environment.score(task(ROW), result("r", texts, finish=finish))
    return list(asyncio.run(scored))


def encoded(tokenizer: CharTokenizer | None = None, **options: Any) -> str:
    environment = Gsm8k(tokenizer or CharTokenizer(), Gsm8kOptions(**options))
    return CharTokenizer().decode(environment.encode(Prompt(0, 0, 0, ROW)))


# --- reward --------------------------------------------------------------------------------------


def test_the_right_number_is_right_however_it_is_given() -> None:
    right = ("72", "#### 72", "so 6 * 12 = 72.0.", "$72", "<think>80?</think>72")
    assert rewards(*right) == [1.0] * len(right)


def test_another_number_or_none_is_wrong() -> None:
    wrong = ("71", "72 or 73", "#### 7 (not 72)", "", "seventy-two", "<think>72")
    assert rewards(*wrong) == [0.0] * len(wrong)


def test_the_form_has_a_reward_of_its_own() -> None:
    assert rewards("#### 72", "#### 5", "72", "5", correct=2.0, format=0.5) == [2.5, 0.5, 2.0, 0.0]


def test_in_strict_form_only_a_marked_number_counts() -> None:
    assert rewards("#### 72", "72", strict=True) == [1.0, 0.0]


def test_a_sample_that_ran_out_of_tokens_is_graded_whole() -> None:
    assert rewards("it is 72", finish="length") == [1.0]


def test_a_thought_that_the_chat_template_opened_is_no_answer() -> None:
    cut, answered = "6 * 12 is 72", "6 * 12 is 72</think>#### 72"
    assert rewards(cut, answered, tokenizer=OpensThought()) == [0.0, 1.0]


@given(st.text(st.characters(max_codepoint=126)), st.booleans())
def test_any_text_gets_a_reward_that_was_promised(text: str, strict: bool) -> None:
    [reward] = rewards(text, format=0.25, strict=strict)
    assert reward in (0.0, 0.25, 1.0, 1.25)


# --- prompt --------------------------------------------------------------------------------------


def test_the_question_goes_through_the_chat_template_with_its_instruction() -> None:
    chat = encoded(system="You add.", instruction="Number only.")
    assert chat == "system:You add.;user:A box of 6 rows of 12?\n\nNumber only.;assistant:"


def test_the_question_reaches_a_template_that_reads_parts_alone() -> None:
    assert encoded(PartsTokenizer(), system="You add.") == encoded(system="You add.")


def test_a_base_model_reads_plain_text() -> None:
    assert encoded(chat=False, instruction="") == "A box of 6 rows of 12?"
    assert encoded(NoTemplate(), chat=False).startswith("A box of 6 rows of 12?\n\n")


def test_a_tokenizer_without_a_chat_template_is_told_when_the_worker_starts() -> None:
    with pytest.raises(NoChatTemplate, match=r"Set environment\.options\.chat to false") as caught:
        make_environment(EnvironmentConfig(name="gsm8k"), NoTemplate(), Path(__file__).parent)
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own bytes
    assert str(copy) == str(caught.value)


# --- rows and options ----------------------------------------------------------------------------


def run_config(folder: Path, options: dict[str, Any] | None = None) -> RunConfig:
    return RunConfig(
        steps=1,
        model=ModelConfig(path="model"),
        environment=EnvironmentConfig(name="gsm8k", options=options or {}),
        data=DataConfig(path=str(folder / "rows.jsonl"), shuffle=False),
        eval=EvalConfig(interval=1, path=str(folder / "rows.jsonl")),
    )


def test_rows_are_questions_in_training_and_evaluation(tmp_path: Path) -> None:
    rows = [ROW, {"question": "1+1?", "answer": 2, "level": 1}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = run_config(tmp_path)
    for source in (make_prompts(config), *make_evaluation_sets(config).values()):
        prompts = [source.prompt(prompt_index) for prompt_index in range(source.rows)]
        assert [prompt.data for prompt in prompts if prompt] == rows


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a"}, r"has no 'question' and no 'answer' \(keys: prompt\)"),
        ({"question": "a"}, r"has no 'answer' \(keys: question\)"),
        ({"question": " ", "answer": "1"}, "'question' is ' '; it must be a string"),
        ({"question": 1, "answer": "1"}, "'question' is 1; it must be a string"),
        ({"question": "a", "answer": 1.5}, "'answer' is 1.5; it must be a string or an integer"),
        ({"question": "a", "answer": True}, "'answer' is True; it must be a string or an integer"),
        ({"question": "a", "answer": "none"}, "'answer' is 'none'; it must hold a number"),
    ],
)
def test_a_row_that_cannot_be_graded_is_named(
    tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n{json.dumps(row)}\n")
    with pytest.raises(PromptFileError, match=rf"rows\.jsonl:2: {problem}"):
        make_prompts(run_config(tmp_path))


@pytest.mark.parametrize("options", [{"corect": 1}, {"correct": "x"}, {"format": [1]}])
def test_options_that_do_not_fit_are_told_before_anything_is_read(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(BadEnvironment, match=r"environment\.options: "):
        make_prompts(run_config(tmp_path, options))

"""Word problems with a number as answer, as in GSM8K: rows, prompt and reward.

A row is ``{"question": "...", "answer": "... #### 72"}``. The answer may also be only the number.
It is trusted code with linear run time, so it runs in the worker's process.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from offbeat.environments.final_answer import (
    FinalAnswer,
    final_answer,
    find_open_thought,
    without_thinking,
)
from offbeat.environments.protocol import SingleTurn
from offbeat.environments.text import Tokenizer, content_ids, for_template
from offbeat.messages.failures import OffbeatError
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask

_LARGEST_REWARD: Final = 1e6
_Reward = Annotated[float, msgspec.Meta(ge=-_LARGEST_REWARD, le=_LARGEST_REWARD)]


class Gsm8kOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``environment.options`` of ``environment.name: gsm8k``.

    A sample's reward is the sum of ``correct`` and ``format`` where they apply.
    """

    correct: _Reward = 1.0
    """Reward if the final answer is the row's number.

    The final answer is the last number after ``####``, else the last number.
    """

    format: _Reward = 0.0
    """Reward if the final answer follows ``####``, right or wrong."""

    strict: bool = False
    """Whether only a number after ``####`` counts as an answer."""

    instruction: str = "Think step by step. End with #### and the answer, a number alone."
    """Text after every question, or empty for none."""

    system: str = ""
    """System message of the chat, or empty for none."""

    chat: bool = True
    """Whether the question is rendered by the model's chat template.

    If not, it is plain text for a base model.
    """


class NoChatTemplate(OffbeatError):
    """The model's tokenizer has no chat template, or it cannot render a question.

    Fix: set ``environment.options.chat: false``, or add ``chat_template.jinja`` to the model.
    """

    problem: str

    def __str__(self) -> str:
        return (
            f"the tokenizer cannot apply a chat template: {self.problem}. Set "
            "environment.options.chat to false, or add chat_template.jinja to the model's directory"
        )


class Gsm8k(SingleTurn):
    """Rewards a response by its final number, ignoring its thinking block.

    Raises:
        NoChatTemplate: ``options.chat`` is set, but the tokenizer has no template.
    """

    def __init__(self, tokenizer: Tokenizer, options: Gsm8kOptions) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._opened_by_prompt = find_open_thought(tokenizer.decode(self._tokens("1+1?")))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self._tokens(prompt.data["question"]))

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        wanted = row_answer(task.prompt.data)
        return [self._reward(ids, wanted) for ids in content_ids(result)]

    def answers(self, result: GenerateResult) -> Sequence[str]:
        given = map(self._answer, content_ids(result))
        return ["" if each is None else each.number for each in given]

    def _answer(self, token_ids: list[int]) -> FinalAnswer | None:
        """Return the answer that is compared with the row's, or None without one."""
        response = self._opened_by_prompt + self._tokenizer.decode(token_ids)
        given = final_answer(without_thinking(response))
        if given is None or (self._options.strict and not given.strict):
            return None
        return given

    def _reward(self, token_ids: list[int], wanted: str | None) -> float:
        given = self._answer(token_ids)
        if given is None:
            return 0.0
        right = self._options.correct if given.number == wanted else 0.0
        return right + (self._options.format if given.strict else 0.0)

    def _tokens(self, question: str) -> list[int]:
        options = self._options
        text = f"{question}\n\n{options.instruction}" if options.instruction else question
        if not options.chat:
            return self._tokenizer.encode(text)
        chat = [{"role": "system", "content": options.system}] if options.system else []
        chat.append({"role": "user", "content": text})
        try:
            return self._tokenizer.apply_chat_template(
                for_template(chat, self._tokenizer),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except ValueError as error:  # transformers raises it without a template
            raise NoChatTemplate(str(error)) from error


def row_answer(row: Mapping[str, Any]) -> str | None:
    """Return the number of a row's ``answer`` in canonical form, or None without one."""
    answer: FinalAnswer | None = final_answer(str(row["answer"]))
    return None if answer is None else answer.number


def row_problem(row: Mapping[str, object]) -> str | None:
    """Return why a row is not a question with a number as answer, or None if it is."""
    if missing := [key for key in ("question", "answer") if key not in row]:
        keys = ", ".join(row)
        return f"has no {' and no '.join(map(repr, missing))} (keys: {keys}); give both"
    question, answer = row["question"], row["answer"]
    if not isinstance(question, str) or not question.strip():
        return f"'question' is {question!r:.80}; it must be a string with at least one character"
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        return f"'answer' is {answer!r:.80}; it must be a string or an integer"
    if row_answer(row) is None:
        return f"'answer' is {answer!r:.80}; it must hold a number"
    return None

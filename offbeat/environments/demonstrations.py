"""Demonstrations: rows that hold the answers to learn, for supervised fine-tuning.

A row is ``{"prompt": "...", "completion": "..."}``, or ``{"messages": [...]}`` with at least one
message of the assistant. Each text that the model learns to write is encoded separately and
appended to the tokens before it. An engine appends sampled tokens the same way, so a run that
continues with reinforcement learning sees the same tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from offbeat.environments.prompt_row import ASSISTANT
from offbeat.environments.prompt_row import row_problem as prompt_problem
from offbeat.environments.protocol import Environment
from offbeat.environments.text import Tokenizer, encode_prompt, for_template, template_options
from offbeat.messages.groups import Prompt


class UnusableDemonstration(Exception):
    """A row cannot be turned into a prompt and tokens to learn."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The tokens of one row."""

    prompt_ids: tuple[int, ...]  # before the first token to learn
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # per token of the response: whether the model learns to write it


class Demonstrations(Environment):
    """Environment that reads its samples from rows of a file, without a model or rewards."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return self.demonstrate(prompt).prompt_ids

    def demonstrate(self, prompt: Prompt) -> Demonstration:
        """Return the tokens of a row. Equal rows give equal tokens.

        Raises:
            UnusableDemonstration: The chat template changes earlier turns when a later turn is
                added, or there is nothing to learn.
        """
        messages = prompt.data.get("messages")
        made = (
            self._plain(prompt)
            if messages is None
            else self._chat(
                for_template(messages, self._tokenizer),
                template_options(prompt.data, self._tokenizer),
            )
        )
        if not made.prompt_ids:
            raise UnusableDemonstration("the prompt has no tokens")
        return made

    def _plain(self, prompt: Prompt) -> Demonstration:
        completion = self._append_end(self._encode(prompt.data["completion"]))
        return Demonstration(
            encode_prompt(prompt, self._tokenizer), completion, (True,) * len(completion)
        )

    def _chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> Demonstration:
        """Return the assistant's messages as tokens to learn, and everything else as context.

        Text that the template writes after an answer's end token is context, too. If the template
        writes no end token, the last answer gets one, so that the model learns to stop.
        """
        answers = [place for place, each in enumerate(messages) if is_answer(each)]
        rendered, prompt_ids = "", tuple[int, ...]()
        response = list[int]()
        mask = list[bool]()
        for place in answers:
            opened = self._render(messages[:place], options, opens_answer=True)
            whole = self._render(messages[: place + 1], options, opens_answer=False)
            context = self._encode(_behind(rendered, opened, place))
            if place == answers[0]:
                prompt_ids = context
            else:
                response += context
                mask += [False] * len(context)
            answer = self._encode(_behind(opened, whole, place))
            if place == answers[-1]:
                answer = self._append_end(answer)
            learned = self._length_to_end(answer)
            response += answer
            mask += [True] * learned + [False] * (len(answer) - learned)
            rendered = whole
        if not any(mask):
            raise UnusableDemonstration("its answers have no tokens")
        return Demonstration(prompt_ids, tuple(response), tuple(mask))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        opens_answer: bool,
    ) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=opens_answer,
            tokenize=False,
            return_dict=False,
            **options,
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _append_end(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of the last answer, with the end token appended if it is missing."""
        end = self._tokenizer.eos_token_id
        return tokens if end is None or end in tokens else (*tokens, end)

    def _length_to_end(self, tokens: tuple[int, ...]) -> int:
        """Return the number of tokens up to the last end token, or of all tokens without one."""
        end = self._tokenizer.eos_token_id
        return len(tokens) - tokens[::-1].index(end) if end in tokens else len(tokens)


def is_answer(message: Mapping[str, Any]) -> bool:
    """Return whether the model learns to write this message."""
    return message["role"] == ASSISTANT


def row_problem(fields: Mapping[str, object]) -> str | None:
    """Return why a row is not a demonstration, or None if it is one."""
    if problem := prompt_problem(fields):
        return problem
    if "prompt" in fields:
        return _problem_of_completion(fields)
    messages = cast("list[dict[str, object]]", fields["messages"])
    if is_answer(messages[0]):
        return "messages[0] is the assistant's; there is nothing before it to answer"
    if not any(map(is_answer, messages)):
        return "has no message of the role 'assistant': there is nothing to learn"
    for place, message in enumerate(messages):
        if is_answer(message) and not (message.get("content") or message.get("tool_calls")):
            return f"messages[{place}] is the assistant's and empty: it would teach to end at once"
    return None


def _problem_of_completion(fields: Mapping[str, object]) -> str | None:
    if "completion" not in fields:
        return (
            f"has no 'completion' (keys: {', '.join(fields)}); add the text that the model "
            "should write"
        )
    completion = fields["completion"]
    if not isinstance(completion, str) or not completion:
        return (
            f"'completion' is {completion!r:.80}; it must be a string with at least one character"
        )
    return None


def _behind(shorter: str, longer: str, place: int) -> str:
    """Return the text that the template adds after ``shorter``."""
    if not longer.startswith(shorter):
        problem = (
            f"the chat template changes the text before messages[{place}] when it adds that message"
        )
        raise UnusableDemonstration(problem)
    return longer[len(shorter) :]

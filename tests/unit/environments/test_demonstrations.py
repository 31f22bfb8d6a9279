"""Rows of a file as what a model is to write: which tokens, and which of them are learned."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from offbeat.environments.demonstrations import (
    Demonstration,
    Demonstrations,
    UnusableDemonstration,
    row_problem,
)
from offbeat.messages.groups import Prompt
from tests.support.environment_fakes import EOS_ID, CharTokenizer, PartsTokenizer

USER, ASSISTANT = "user", "assistant"


class ChatTokenizer(CharTokenizer):
    """Writes ``<user>text`` and ``<assistant>text``, the end token, and a line break behind it."""

    def written(self, conversation: Sequence[Mapping[str, Any]], *, opens_answer: bool) -> str:
        text = "".join(f"<{each['role']}>{each['content']}\0\n" for each in conversation)
        return text + "<assistant>" * opens_answer


class ForgetfulTokenizer(ChatTokenizer):
    """Shows of earlier answers only that there was one, as templates that drop reasoning do."""

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        shown = [
            each
            if each["role"] == USER or place == len(conversation) - 1
            else {**each, "content": ""}
            for place, each in enumerate(conversation)
        ]
        return super().apply_chat_template(shown, **options)


def demonstrated(row: dict[str, Any], tokenizer: CharTokenizer | None = None) -> Demonstration:
    return Demonstrations(tokenizer or CharTokenizer()).demonstrate(Prompt(0, 0, 0, row))


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def learned(made: Demonstration) -> list[str]:
    """The stretches of the response that are learned."""
    shown = "".join(
        chr(token) if mask else "|"
        for token, mask in zip(made.response_ids, made.loss_mask, strict=True)
    )
    return [each for each in shown.split("|") if each]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_completion_is_learned_whole_and_with_its_end() -> None:
    made = demonstrated({"prompt": "3+4=", "completion": "7"})
    assert made.prompt_ids == ids("3+4=")
    assert made.response_ids == (*ids("7"), EOS_ID)
    assert made.loss_mask == (True, True)


def test_the_prompt_is_the_one_that_a_run_with_engines_would_sample_from() -> None:
    chat, plain = [said(USER, "3+4?")], Demonstrations(ChatTokenizer())
    row = {"messages": [*chat, said(ASSISTANT, "7")]}
    opened = ChatTokenizer().apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert plain.encode(Prompt(0, 0, 0, row)) == tuple(opened)


def test_of_a_conversation_only_what_the_assistant_says_is_learned() -> None:
    messages = [said(USER, "3+4?"), said(ASSISTANT, "7"), said(USER, "+1?"), said(ASSISTANT, "8")]
    made = demonstrated({"messages": messages}, ChatTokenizer())
    assert made.prompt_ids == ids("<user>3+4?\0\n<assistant>")
    assert made.response_ids == ids("7\0\n<user>+1?\0\n<assistant>8\0\n")
    assert learned(made) == ["7\0", "8\0"], "neither the user, nor what stands behind an end token"


def test_messages_behind_the_last_answer_are_left_out() -> None:
    messages = [said(USER, "3+4?"), said(ASSISTANT, "7"), said(USER, "thanks")]
    assert demonstrated({"messages": messages}, ChatTokenizer()).response_ids == ids("7\0\n")


def test_an_answer_that_the_template_leaves_open_is_ended() -> None:
    made = demonstrated({"messages": [said(USER, "3+4?"), said(ASSISTANT, "7")]})
    assert learned(made) == ["7;\0"]


def test_texts_reach_a_template_in_the_form_that_it_reads() -> None:
    parts = [{"type": "text", "text": "3+"}, {"type": "text", "text": "4?"}]
    wanted = demonstrated({"messages": [said(USER, "3+4?"), said(ASSISTANT, "7")]})
    mixed = {"messages": [{"role": USER, "content": parts}, said(ASSISTANT, "7")]}
    assert demonstrated(mixed, PartsTokenizer()) == wanted, "it leaves out what is not a list"
    assert demonstrated(mixed, CharTokenizer()) == wanted, "it prints a list as Python writes it"


def test_a_template_that_rewrites_earlier_answers_is_refused() -> None:
    messages = [said(USER, "3+4?"), said(ASSISTANT, "7"), said(USER, "+1?"), said(ASSISTANT, "8")]
    assert demonstrated({"messages": messages[:2]}, ForgetfulTokenizer())
    with pytest.raises(UnusableDemonstration, match=r"changes the text before messages\[3\]"):
        demonstrated({"messages": messages}, ForgetfulTokenizer())


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"completion": "7"}, "has neither of 'prompt' and 'messages'"),
        ({"prompt": "3+4="}, "has no 'completion'"),
        ({"prompt": "3+4=", "completion": ""}, "'completion' is ''"),
        ({"prompt": "3+4=", "completion": 7}, "'completion' is 7"),
        ({"messages": [said(USER, "3+4?")]}, "no message of the role 'assistant'"),
        ({"messages": [said(ASSISTANT, "7")]}, "nothing before it to answer"),
        (
            {"messages": [said(USER, "?"), said(ASSISTANT, "")]},
            "messages[1] is the assistant's and",
        ),
    ],
)
def test_a_row_without_anything_to_learn_is_refused_before_the_run(
    row: dict[str, Any], problem: str
) -> None:
    assert problem in (row_problem(row) or "")


def test_rows_with_something_to_learn_are_taken() -> None:
    assert row_problem({"prompt": "3+4=", "completion": "7"}) is None
    assert row_problem({"messages": [said(USER, "3+4?"), said(ASSISTANT, "7")]}) is None

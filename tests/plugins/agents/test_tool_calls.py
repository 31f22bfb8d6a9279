"""Tool calls are understood whole, or are text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.plugins.agents.endpoint.chat import parse_tool_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def test_calls_behind_the_content_are_parsed() -> None:
    content, calls = parse_tool_calls(f"Let me see.\n{CALL}\n{CALL}\n")
    assert content == "Let me see."
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 2})] * 2


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        CALL[:-12],
        f"{CALL} and more",
        f"{CALL} between {CALL}",
        "</tool_call>",
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}, "id": 1}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        f"{CALL}<tool_call>{{}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>",
    ],
)
def test_whatever_deviates_is_content_as_it_is(text: str) -> None:
    assert parse_tool_calls(text) == (text, ())


@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call>{}", "</tool_call>", "<tool_call><"])
def test_a_long_answer_of_tags_hangs_no_worker(piece: str) -> None:
    text = piece * 100_000  # in quadratic time an hour, and the test has two minutes
    assert parse_tool_calls(text) == (text, ())


@given(st.text('<tool_call>/{"name": "arguments", {}}'))
def test_any_text_is_either_whole_or_split(text: str) -> None:
    content, calls = parse_tool_calls(text)
    assert bool(calls) == (content != text)

"""Messages of a chat, in the one form in which they are compared and rendered."""

import pytest

from offbeat.plugins.agents.endpoint.chat import ChatMessage, ToolCall, compact_json
from tests.support.agent_endpoint import template


def test_a_message_for_a_template_has_the_fields_that_are_not_empty() -> None:
    assert ChatMessage("user", "hello").for_template() == {"role": "user", "content": "hello"}
    answer = ChatMessage("tool", "4", tool_call_id="call-1", name="add")
    assert answer.for_template() == {
        "role": "tool",
        "content": "4",
        "tool_call_id": "call-1",
        "name": "add",
    }


@pytest.mark.parametrize(
    ("arguments", "want"),
    [('{"a":1}', {"a": 1}), ("not JSON", "not JSON"), ("[" * 100_000, "[" * 100_000)],
)
def test_a_template_gets_the_calls_of_tools_with_their_arguments_as_objects(
    arguments: str, want: object
) -> None:
    calls = (ToolCall("call-1", "add", arguments), ToolCall("call-2", "stop", "{}"))
    fields = ChatMessage("assistant", tool_calls=calls).for_template()
    assert fields["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": want}},
        {"id": "call-2", "type": "function", "function": {"name": "stop", "arguments": {}}},
    ]


def test_json_is_compared_without_its_spaces_and_keeps_the_order_that_a_template_shows() -> None:
    assert compact_json('{ "b" : 1, "a": [1, 2] }') == '{"b":1,"a":[1,2]}'
    assert compact_json("no { JSON") == "no { JSON"


def test_a_text_reaches_a_template_that_reads_parts_alone() -> None:
    reads_parts = template(
        "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }};"
        "{% endfor %}{% endfor %}"
    )
    asked = [ChatMessage("system", "add"), ChatMessage("user", "3+4?")]
    assert reads_parts.render(asked, (), opens_answer=False) == "add;3+4?;"

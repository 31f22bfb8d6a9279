"""Values nested as deeply as recursion goes: from a model and from an agent, none fails a sample as a bug."""

import asyncio
from typing import Any

import pytest

from offbeat.messages.bad_json import DEEPEST
from offbeat.messages.generation import SamplingParams
from offbeat.plugins.agents.endpoint.chat import (
    ChatMessage,
    ToolCall,
    compact_json,
    parse_tool_calls,
)
from offbeat.plugins.agents.endpoint.chat_bridge import TemplateRefused
from offbeat.plugins.agents.endpoint.errors import RequestRefused
from offbeat.plugins.agents.endpoint.renderer_bridge import RendererBridge
from offbeat.plugins.agents.endpoint.requests import ChatRequest, decode_body
from offbeat.plugins.agents.endpoint.session import ChatTurn
from tests.plugins.agents.test_renderer_bridge import Parsed, PlainRenderer
from tests.support.agent_conversations import TOOL, user
from tests.support.agent_endpoint import DrawnBytes, encode, session, template

DEPTHS = range(700, 1100)  # where one of two recursive functions ends, and the other does not


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def drawn(depth: int) -> str:
    return f'<tool_call>{{"name": "f", "arguments": {{"a": {nested(depth)}}}}}</tool_call>'


@pytest.mark.parametrize("depth", [1, DEEPEST - 1])
def test_arguments_up_to_the_bound_are_a_call(depth: int) -> None:
    assert len(parse_tool_calls(drawn(depth))[1]) == 1


def test_arguments_beyond_it_are_content() -> None:
    for depth in (DEEPEST, *DEPTHS):
        assert parse_tool_calls(drawn(depth)) == (drawn(depth), ())


def test_arguments_that_a_client_sends_are_rendered_or_refused() -> None:
    def outcome(depth: int) -> str:
        call = ToolCall("1", "f", compact_json(f'{{"a": {nested(depth)}}}'))
        answer = ChatMessage("assistant", "", (call,))
        try:
            return template().render([user("one"), answer], (), opens_answer=True)[:1]
        except TemplateRefused as refused:
            return str(refused.args[0]).partition(" depth")[0]

    assert {outcome(depth) for depth in DEPTHS} == {"<", "maximum recursion"}


def test_a_tool_that_a_client_offers_is_taken_or_refused_by_name() -> None:
    def outcome(depth: int) -> str:
        tool = f'{{"type": "function", "function": {{"name": "f", "p": {nested(depth)}}}}}'
        body = f'{{"model": "m", "messages": [{{"role": "user"}}], "tools": [{tool}]}}'
        try:
            turn = decode_body(body.encode(), ChatRequest).turn(SamplingParams())
            return template().render(turn.messages, turn.tools, opens_answer=True)[:1]
        except RequestRefused as refused:
            return f"{refused.status:d}"
        except TemplateRefused:
            return "refused by the template"

    # Since Python 3.12 the decoder goes deeper than the template does.
    depths = (*DEPTHS, 20_000)
    assert {"<", "400"} <= {outcome(depth) for depth in depths}


class Stumbling(PlainRenderer):
    """Reads an answer by recursion, as ``json.loads`` does."""

    def parse_response(self, token_ids: list[int], **_: Any) -> Parsed:
        raise RecursionError("maximum recursion depth exceeded")


def test_an_answer_that_a_renderer_cannot_read_is_content() -> None:
    said = '<tool_call>{"name": "f", "arguments": ' + "[" * 2000
    on = session(
        DrawnBytes([said]), bridge=RendererBridge(Stumbling(), template()), max_new_tokens=5000
    )
    turn = asyncio.run(on.chat(ChatTurn((user("one"),), (TOOL,))))
    assert turn.answer.content == said
    assert turn.completion_ids == encode(said)
    assert on.failure is None

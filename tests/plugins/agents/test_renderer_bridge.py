"""A renderer's promises are checked: a stand-in breaks each. With the library: tests/environments."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from offbeat.plugins.agents.endpoint.chat import ChatMessage
from offbeat.plugins.agents.endpoint.chat_bridge import BranchReason, TemplateRefused
from offbeat.plugins.agents.endpoint.renderer_bridge import RendererBridge
from offbeat.plugins.agents.endpoint.session import ChatTurn, SampleSession, Turn
from tests.support.agent_conversations import TOOL, user
from tests.support.agent_endpoint import DrawnBytes, encode, session, template

OTHER_END = 10  # a line break


@dataclass(slots=True)
class Attempt:
    name: str | None
    arguments: Any
    status: str = "ok"


@dataclass(slots=True)
class Parsed:
    content: str
    reasoning_content: str | None
    tool_calls: list[Attempt]


@dataclass(slots=True)
class Bridged:
    token_ids: list[int]


@dataclass(slots=True)
class PlainRenderer:
    """Joins contents end to end; its faults can be switched on."""

    cuts_history: bool = False
    refuses: bool = False
    calls: tuple[Attempt, ...] = ()

    def render_ids(self, messages: Any, **_: Any) -> list[int]:
        if self.refuses:
            raise ValueError("no such role")
        return encode("".join(message["content"] for message in messages))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Any,
        **_: Any,
    ) -> Bridged | None:
        drawn = [*previous_prompt_ids, *previous_completion_ids]
        return Bridged(
            [*drawn[: -1 if self.cuts_history else None], *self.render_ids(new_messages)]
        )

    def parse_response(self, token_ids: list[int], **_: Any) -> Parsed:
        return Parsed(template().decode(token_ids), None, list(self.calls))

    def get_stop_token_ids(self) -> list[int]:
        return [OTHER_END]


def joined(renderer: PlainRenderer, *said: str) -> tuple[SampleSession, DrawnBytes]:
    engine = DrawnBytes(list(said))
    return session(engine, bridge=RendererBridge(renderer, template())), engine


async def two_turns(on: SampleSession) -> Turn:
    first = await on.chat(ChatTurn((user("one"),), (TOOL,)))
    return await on.chat(ChatTurn((user("one"), first.answer, user("two")), (TOOL,)))


def test_the_next_prompt_is_what_was_drawn_and_what_the_renderer_adds() -> None:
    on, engine = joined(PlainRenderer(), "hi<|im_end|>")
    assert asyncio.run(two_turns(on)).parent is on.turns[0]
    assert engine.calls[1][0].prompt_ids == tuple(encode("onehi<|im_end|>two"))


def test_a_renderer_that_cuts_what_was_drawn_opens_a_branch() -> None:
    on, engine = joined(PlainRenderer(cuts_history=True), "hi<|im_end|>")
    assert asyncio.run(two_turns(on)).reason is BranchReason.RENDERER_DECLINED
    assert engine.calls[1][0].prompt_ids == tuple(encode("onehitwo"))


def test_messages_that_a_renderer_does_not_take_are_refused() -> None:
    on, _ = joined(PlainRenderer(refuses=True))
    with pytest.raises(TemplateRefused, match="no such role"):
        asyncio.run(two_turns(on))


def test_the_engine_stops_at_the_end_tokens_of_the_renderer() -> None:
    on, engine = joined(PlainRenderer(), "hi<|im_end|>")
    asyncio.run(two_turns(on))
    assert engine.calls[0][0].sampling.stop_token_ids == (OTHER_END,)


def test_variables_of_a_chat_template_are_no_matter_of_a_renderer() -> None:
    on, _ = joined(PlainRenderer())
    with pytest.raises(TemplateRefused, match="takes no chat_template_kwargs"):
        asyncio.run(on.chat(ChatTurn((user("one"),), variables='{"enable_thinking":false}')))


@pytest.mark.parametrize(
    "broken", [Attempt("add", {}, "invalid_json"), Attempt(None, {}), Attempt("add", '{"a"')]
)
def test_one_call_that_is_not_whole_makes_all_of_the_answer_content(broken: Attempt) -> None:
    whole = Attempt("add", {"a": 1})
    on, _ = joined(PlainRenderer(calls=(whole,)), "hi<|im_end|>")
    turn = asyncio.run(on.chat(ChatTurn((user("one"),), (TOOL,))))
    assert [call.name for call in turn.answer.tool_calls] == ["add"]
    on, _ = joined(PlainRenderer(calls=(whole, broken)), "hi<|im_end|>")
    turn = asyncio.run(on.chat(ChatTurn((user("one"),), (TOOL,))))
    assert turn.answer == ChatMessage("assistant", "hi")

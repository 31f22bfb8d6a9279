"""Turns joined by the library renderers. Skipped without it: ``make test-verifiers``."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config.run import RunConfig
from offbeat.environments.factory import BadEnvironment
from offbeat.messages.finding import Level
from offbeat.plugins.agents.checks import check_agent
from offbeat.plugins.agents.endpoint.bridges import make_bridge, make_renderer
from offbeat.plugins.agents.endpoint.chat import ChatMessage
from offbeat.plugins.agents.endpoint.chat_bridge import BranchReason, ChatBridge
from offbeat.plugins.agents.endpoint.session import ChatTurn, SampleSession, Turn
from tests.support.agent_conversations import (
    ANSWERS,
    STEPS,
    TOOL,
    check_what_is_trained,
    user,
    wander,
)
from tests.support.agent_endpoint import (
    CHATML,
    NO_END_TOKENS,
    DrawnBytes,
    qwen_byte_tokenizer,
    session,
)

pytest.importorskip("renderers", reason="the extra renderers is not installed")

pytestmark = [pytest.mark.environments, pytest.mark.filterwarnings("default")]

TOKENIZER = qwen_byte_tokenizer()
CALL = '<tool_call>\n{"name": "add",  "arguments": {"a":2, "b": 3}}\n</tool_call>'
"""Two spaces and none where JSON is written anew with one: encoded again it would be other tokens."""
KEEPS = {"name": "qwen3", "thinking_retention": "all"}
DROPS = {"name": "qwen3"}


def bridge(**options: Any) -> ChatBridge:
    return make_bridge(TOKENIZER, options, ())


def joined(*said: str, **options: Any) -> tuple[SampleSession, DrawnBytes]:
    engine = DrawnBytes(list(said), encode=TOKENIZER.encode)
    return session(engine, bridge=bridge(**options or DROPS)), engine


async def two_turns(on: SampleSession, after: ChatMessage) -> tuple[Turn, Turn]:
    first = await on.chat(ChatTurn((user("2+3?"),), (TOOL,)))
    return first, await on.chat(ChatTurn((user("2+3?"), first.answer, after), (TOOL,)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(STEPS, max_size=8),
    st.integers(1, 80),
    st.booleans(),
    ANSWERS,
    st.sampled_from([KEEPS, DROPS, DROPS | {"enable_thinking": False}]),
)
def test_every_drawn_token_is_trained_once_with_its_logprob_and_nothing_else_is(
    steps: list[str], most: int, stops: bool, answers: list[str], options: dict[str, Any]
) -> None:
    engine = DrawnBytes(answers, encode=TOKENIZER.encode)
    on = session(engine, max_new_tokens=most, bridge=bridge(**options))
    asyncio.run(wander(on, steps, ("b}",) if stops else ()))
    check_what_is_trained(on, engine)
    for turn in on.turns:
        if turn.parent is not None:
            drawn = turn.parent.history.token_ids
            assert turn.prompt.token_ids == (*drawn, *turn.prompt.new_ids)


def test_tool_calls_and_reasoning_are_read_from_tokens_and_the_call_is_not_written_anew() -> None:
    on, engine = joined(f"<think>\nadd\n</think>\n\n{CALL}<|im_end|>", "5<|im_end|>")
    first, second = asyncio.run(two_turns(on, ChatMessage("tool", "5", tool_call_id="x")))
    (call,) = first.answer.tool_calls
    assert (call.name, call.arguments) == ("add", '{"a":2,"b":3}')
    assert (first.answer.reasoning.strip(), first.answer.content) == ("add", "")
    assert (second.parent, second.reason) == (first, None)
    asked = str(TOKENIZER.decode(list(engine.calls[1][0].prompt_ids)))
    assert asked.endswith(
        f"<think>\nadd\n</think>\n\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_client_that_drops_the_reasoning_goes_on_with_the_same_tokens() -> None:
    on, _ = joined("<think>\nhm\n</think>\n\nfive<|im_end|>", **KEEPS)

    async def main() -> Turn:
        first = await on.chat(ChatTurn((user("2+3?"),)))
        sent = ChatMessage("assistant", first.answer.content)
        assert sent != first.answer
        return await on.chat(ChatTurn((user("2+3?"), sent, user("sure?"))))

    assert asyncio.run(main()).parent is on.turns[0]


def test_a_client_goes_on_with_an_answer_that_a_stop_string_ended() -> None:
    on, engine = joined("<think>\nhm\n</think>\n\nsay: rest", **KEEPS)

    async def main() -> Turn:
        first = await on.chat(ChatTurn((user("2+3?"),), stop=(":",)))
        assert first.answer.content == "say"
        sent = ChatMessage("assistant", "say: five")
        return await on.chat(ChatTurn((user("2+3?"), sent, user("sure?"))))

    assert asyncio.run(main()).parent is on.turns[0]
    asked = str(TOKENIZER.decode(list(engine.calls[1][0].prompt_ids)))
    assert "</think>\n\nsay: five<|im_end|>\n<|im_start|>user\nsure?" in asked


@pytest.mark.parametrize(
    ("options", "reason"), [(DROPS, BranchReason.RENDERER_DECLINED), (KEEPS, None)]
)
def test_a_new_question_forgets_the_reasoning_unless_the_recipe_keeps_it(
    options: dict[str, Any], reason: BranchReason | None
) -> None:
    on, _ = joined("<think>\nhm\n</think>\n\nfive<|im_end|>", "yes<|im_end|>", **options)
    _, second = asyncio.run(two_turns(on, user("sure?")))
    assert second.reason is reason


def test_a_malformed_call_is_content_as_the_model_wrote_it() -> None:
    said = '<think>\nadd\n</think>\n\n<tool_call>\n{"name": add}\n</tool_call>'
    on, _ = joined(f"{said}<|im_end|>")
    turn = asyncio.run(on.chat(ChatTurn((user("2+3?"),), (TOOL,))))
    assert (turn.answer.content, turn.answer.tool_calls) == (said, ())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"name": "default"}, "continues no conversation"),
        ({"name": "auto"}, "continues no conversation"),
        ({"name": "qwen4"}, "qwen4"),
        ({"name": "llama-3"}, "llama-3"),
        ({"thinking_retention": "all"}, "name"),
    ],
)
def test_a_renderer_that_cannot_join_turns_is_refused_by_name(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(BadEnvironment, match=problem) as caught:
        make_renderer(TOKENIZER, options)
    assert caught.value.key == "environment.renderer"


def recipe(folder: Path, chat_template: str | None, **renderer: Any) -> RunConfig:
    tokenizer = qwen_byte_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    agent = {"name": "agent", "target": "mine:run", "renderer": renderer}
    sections = {"environment": agent, "data": {"path": "tasks.jsonl"}}
    return RunConfig.model_validate({"steps": 1, "model": {"path": str(folder)}, **sections})


@pytest.mark.parametrize(
    ("chat_template", "renderer", "level", "said"),
    [
        (CHATML, {}, Level.OK, "by the chat template of"),
        (NO_END_TOKENS, {}, Level.OK, "named; it shows no tools"),
        (CHATML, DROPS, Level.WARNING, "opens a conversation with a tool differently from"),
        (None, DROPS, Level.OK, "no chat template to compare it with"),
        (None, {}, Level.ERROR, "needs a tokenizer with a chat template"),
        (CHATML, {"name": "qwen4"}, Level.ERROR, "environment.renderer: "),
    ],
)
def test_check_says_what_joins_turns_and_why(
    tmp_path: Path, chat_template: str | None, renderer: dict[str, Any], level: Level, said: str
) -> None:
    found = next(iter(check_agent(recipe(tmp_path, chat_template, **renderer))))
    assert found.level is level
    assert said in found.message

"""Agents of OpenAI's SDK against the endpoint. Skipped without it: ``make test-agents``."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from offbeat.plugins.agents.endpoint.server import AgentEndpoint
from offbeat.plugins.agents.endpoint.session import Branch
from tests.support.agent_endpoint import DrawnBytes, encode, session, trained_tokens

openai = pytest.importorskip("openai", reason="the extra agents is not installed")
# Not the package alone: this folder has its name, where tests/ is on the path.
pytest.importorskip("agents.tool", reason="the extra openai-agents is not installed")
agents = pytest.importorskip("agents")

pytestmark = [pytest.mark.agents, pytest.mark.filterwarnings("default")]

SCRIPT = (
    (
        '<tool_call>{"name": "add",  "arguments": {"a": 2, "b":3}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"b": 1, "a": 1}}</tool_call><|im_end|>'
    ),
    "They are  5 and 2.<|im_end|>",
)


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def runs(agent: Any) -> str:
    return (await agents.Runner.run(agent, "2+3? 1+1?")).final_output


async def streams(agent: Any) -> str:
    run = agents.Runner.run_streamed(agent, "2+3? 1+1?")
    async for _ in run.stream_events():
        pass
    return run.final_output


@pytest.mark.parametrize("plays", [runs, streams])
def test_an_agent_with_two_tool_calls_at_once_is_one_branch(
    plays: Callable[[Any], Awaitable[str]],
) -> None:
    agents.set_tracing_disabled(disabled=True)  # it would send every run to OpenAI

    async def main() -> tuple[str, tuple[Branch, ...]]:
        endpoint = AgentEndpoint("policy")
        await endpoint.start()
        key = endpoint.open(session(DrawnBytes(list(SCRIPT))))
        try:
            async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key) as client:
                model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
                agent = agents.Agent(
                    name="adder", instructions="Be short.", tools=[add], model=model
                )
                return await plays(agent), await endpoint.finish(key)
        finally:
            await endpoint.close()

    answer, (branch,) = asyncio.run(main())
    assert answer == "They are  5 and 2."
    assert trained_tokens(branch) == [token for said in SCRIPT for token in encode(said)]

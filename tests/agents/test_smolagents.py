"""Agents of smolagents against the endpoint. Skipped where it is not installed: ``make test-agents``."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from offbeat.plugins.agents.endpoint.chat_bridge import BranchReason
from offbeat.plugins.agents.endpoint.server import AgentEndpoint
from offbeat.plugins.agents.endpoint.session import Branch
from tests.support.agent_endpoint import DrawnBytes, encode, session, trained_tokens

smolagents = pytest.importorskip("smolagents", reason="the extra smolagents is not installed")

pytestmark = [pytest.mark.agents, pytest.mark.filterwarnings("default")]

CALLS = (
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><|im_end|>',
    '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call><|im_end|>',
)
CODE = (
    "Thought: I  add.\n<code>\nx = add(2, 3)\nprint(x)\n</code>",
    "Thought: done.\n<code>\nfinal_answer(str(x))\n</code>",
)


def solve(
    make_agent: Callable[[Any, Any], Any], script: tuple[str, ...]
) -> tuple[Any, tuple[Branch, ...]]:
    """Return what an agent answers to 2+3, where the model says the script, and its branches."""

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    async def main() -> tuple[Any, tuple[Branch, ...]]:
        endpoint = AgentEndpoint("policy")
        await endpoint.start()
        key = endpoint.open(session(DrawnBytes(list(script))))
        model = smolagents.OpenAIModel(model_id="policy", api_base=endpoint.base_url, api_key=key)
        try:
            solver = make_agent(add, model)
            return await asyncio.to_thread(solver.run, "What is 2+3?"), await endpoint.finish(key)
        finally:
            await endpoint.close()

    return asyncio.run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_calling_agent_solves_its_task_and_every_token_is_trained_once(
    streams: bool,
) -> None:
    def agent(add: Any, model: Any) -> Any:
        return smolagents.ToolCallingAgent(
            tools=[add], model=model, max_steps=3, verbosity_level=0, stream_outputs=streams
        )

    answer, branches = solve(agent, CALLS)
    assert answer == "5"
    trained = [token for branch in branches for token in trained_tokens(branch)]
    assert trained == [token for call in CALLS for token in encode(call)]
    # it sends tool calls back as text of its own: the second step cannot continue the first
    reasons = [branch.reason for branch in branches]
    assert reasons == [BranchReason.OPENING, BranchReason.HISTORY_EDITED]


@pytest.mark.parametrize("streams", [False, True])
def test_the_steps_of_an_agent_that_writes_code_are_one_branch(streams: bool) -> None:
    """It goes on with the model's answer behind the stop string; what was drawn stays as it is."""

    def agent(add: Any, model: Any) -> Any:
        return smolagents.CodeAgent(
            tools=[add], model=model, max_steps=3, verbosity_level=0, stream_outputs=streams
        )

    answer, (branch,) = solve(agent, CODE)
    assert answer == "5"
    assert trained_tokens(branch) == [token for code in CODE for token in encode(code)]

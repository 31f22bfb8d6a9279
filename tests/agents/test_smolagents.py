"""Agents of smolagents against the endpoint. Skipped where it is not installed: ``make test-agents``."""

import asyncio
from typing import Any

import pytest

from offbeat.endpoint.server import AgentEndpoint
from offbeat.endpoint.template_bridge import BranchReason
from tests.support.agent_endpoint import DrawnBytes, encode, session

smolagents = pytest.importorskip("smolagents", reason="the extra agents is not installed")

pytestmark = [pytest.mark.agents, pytest.mark.filterwarnings("default")]

STEPS = (
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><|im_end|>',
    '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call><|im_end|>',
)


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_calling_agent_solves_its_task_and_every_token_is_trained_once(
    streams: bool,
) -> None:
    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    async def main() -> None:
        endpoint = AgentEndpoint("policy")
        await endpoint.start()
        on = session(DrawnBytes(list(STEPS)))
        key = endpoint.open(on)

        def agent() -> Any:
            model = smolagents.OpenAIModel(
                model_id="policy", api_base=endpoint.base_url, api_key=key
            )
            solver = smolagents.ToolCallingAgent(
                tools=[add], model=model, max_steps=3, verbosity_level=0, stream_outputs=streams
            )
            return solver.run("What is 2+3?")

        try:
            assert await asyncio.to_thread(agent) == "5"
        finally:
            branches = await endpoint.finish(key)
            await endpoint.close()
        trained = [
            token
            for branch in branches
            for token, kept in zip(branch.transcript.token_ids, branch.transcript.mask, strict=True)
            if kept
        ]
        assert trained == [token for step in STEPS for token in encode(step)]
        # it sends tool calls back as text of its own: the second step cannot continue the first
        assert [branch.reason for branch in branches] == [
            BranchReason.OPENING,
            BranchReason.HISTORY_EDITED,
        ]

    asyncio.run(main())

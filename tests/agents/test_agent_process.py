"""OpenAI's client where it belongs: in an agent's process, against the endpoint of its worker."""

import asyncio
from pathlib import Path

import pytest

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.messages.generation import SamplingParams
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.plugins.agents.factory import make_agent
from offbeat.rollouts.calls import EngineClient
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.transfer_queue import schema
from tests.support.agent_endpoint import DrawnBytes, started_groups

pytest.importorskip("openai", reason="the extra agents is not installed")

pytestmark = pytest.mark.agents


def test_an_agent_with_openais_client_is_trained_on_the_tokens_it_was_answered() -> None:
    engine = DrawnBytes(["one<|im_end|>", "two<|im_end|>"])

    async def main() -> tuple[Receipt, Columns]:
        recipe = EnvironmentConfig(name="agent", target="openai_agents:converses")
        async with started_groups(make_agent(recipe, Path(__file__).parent)) as groups:
            task = RolloutTask(Prompt(7, 0, 7, {"question": "?"}), 1, 1, "engine-0", 3, 60.0)
            client = EngineClient(task, engine.generate, SamplingParams(max_new_tokens=40), 4000)
            return await groups.run_group(client, SampleFailurePolicy("retry"))

    receipt, columns = asyncio.run(main())
    assert (receipt.rewards, receipt.turns) == ((1.0,), (2,))
    assert receipt.rewards_by_name == (("messages", (5.0,)),)
    drawn = [token for _, said, _ in engine.calls for token in said]
    assert columns[schema.RESPONSE_IDS][columns[schema.LOSS_MASK]].tolist() == drawn

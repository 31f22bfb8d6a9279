"""The calculator agent against scripted models, and with its own. Needs the extra ``agents``."""

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="the extra agents is not installed")

import torch
from transformers import AutoTokenizer

from examples.tiny_calculator.agent import connections, run
from offbeat.config.loader import load_recipe
from offbeat.environments.environment_plugin import AgentClient
from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.model import load_model
from offbeat.generators.embedded.start import Detokenizer
from offbeat.generators.engine_loop import EngineLoop
from offbeat.messages.generation import SamplingParams
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.plugins.agents.endpoint.agent_groups import AgentGroups
from offbeat.plugins.agents.endpoint.bridges import TokenizerTemplate
from offbeat.plugins.agents.endpoint.server import AgentEndpoint
from offbeat.plugins.agents.endpoint.session import SessionLimits
from offbeat.plugins.agents.endpoint.template_bridge import TemplateBridge
from offbeat.plugins.agents.factory import make_agent
from offbeat.rollouts.calls import EngineClient
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.transfer_queue import schema
from tests.support.agent_endpoint import DrawnBytes, session
from tests.support.tutorials import Page

pytestmark = pytest.mark.agents

ROOT = Path(__file__).parents[2]
TASK = {"question": "What is 47 times 83 times 61?", "answer": 237961}


@cache
def page() -> dict[str, Any]:
    """Return the names that the agent of ``docs/your-agent.md`` defines."""
    page = Page.read(ROOT / "docs" / "your-agent.md")
    (code,) = (block.text for block in page.blocks if block.title == "my_agent.py")
    names = dict[str, Any]()
    exec(code, names)  # noqa: S102 - the program of the page
    return names


def call(expression: str) -> str:
    function = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>{function}</tool_call><|im_end|>"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """The loop of one agent process: its connections outlive an episode."""
    with asyncio.Runner() as runner:
        yield runner
        runner.run(connections().aclose())
        runner.run(page()["connections"]().aclose())


def episode(loop: asyncio.Runner, *script: str, agent: Any = run) -> tuple[float, list[str]]:
    """Return the reward of the agent and the prompts of a model that says what the script says."""
    engine = DrawnBytes(list(script))

    async def play() -> float:
        endpoint = AgentEndpoint("policy")
        await endpoint.start()
        key = endpoint.open(on)
        try:
            return await agent(TASK, AgentClient(endpoint.base_url, key, "policy"))
        finally:
            await endpoint.close()

    on = session(engine, max_new_tokens=200)
    reward = loop.run(play())
    assert len(on.finish()) == 1
    decode = on.bridge.decode
    return reward, [decode(request.prompt_ids) for request, *_ in engine.calls]


def test_what_the_calculator_answers_is_read_by_the_model_and_given_as_the_answer(
    loop: asyncio.Runner,
) -> None:
    reward, prompts = episode(loop, call("47*83"), call("3901*61"), "237961<|im_end|>")
    assert reward == 1.0
    assert "237961" not in prompts[1]
    assert "237961" in prompts[2]


@pytest.mark.parametrize(
    "script",
    [
        ["237962<|im_end|>"],
        ["The answer is 237961<|im_end|>"],
        [call("47*83"), "3901<|im_end|>"],
        [call("47*83")] * 4,
    ],
    ids=["a_wrong_number", "more_than_the_number", "half_the_way", "no_answer"],
)
def test_anything_but_the_right_number_at_the_end_is_worth_nothing(
    loop: asyncio.Runner, script: list[str]
) -> None:
    assert episode(loop, *script)[0] == 0.0


def test_a_call_of_another_form_is_answered_and_may_be_corrected(loop: asyncio.Runner) -> None:
    reward, prompts = episode(
        loop, call("47*83*61"), call("47*83"), call("3901*61"), "237961<|im_end|>"
    )
    assert reward == 1.0
    assert "error: write a*b" in prompts[1]


def test_the_agent_of_the_page_does_the_same(loop: asyncio.Runner) -> None:
    said = (call("47 by 83"), call("47*83"), call("3901*61"), "237961<|im_end|>")
    reward, prompts = episode(loop, *said, agent=page()["run"])
    assert reward == 1.0
    assert "error: write a*b" in prompts[1]


def test_the_model_plays_the_agent_of_the_recipe_as_single_conversations() -> None:
    """In processes, over HTTP, on the embedded engine: rewards of both kinds, no branch."""
    config = load_recipe(ROOT / "recipes/agent-calculator.yaml").config
    directory = config.model.path
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    template = TokenizerTemplate(tokenizer)
    ends = (tokenizer.eos_token_id,)
    engine = EmbeddedEngine(
        load_model(directory, torch.float32, "cpu", trust_remote_code=False),
        name="engine-0",
        incarnation="first",
        eos_token_ids=ends,
        max_sequences=8,
        max_model_len=config.generator.max_model_len,
        deterministic=False,
        seed=0,
        device="cpu",
        decode=Detokenizer(directory, trust_remote_code=False),
    )
    recipe = config.environment.model_copy(update={"reward_workers": 2})

    async def play() -> tuple[Receipt, Columns]:
        loop = EngineLoop(engine)
        agent = make_agent(recipe, ROOT)
        bridge = TemplateBridge(template, template.end_texts(ends))
        groups = AgentGroups(agent, bridge, SessionLimits())
        await groups.start()
        try:
            task = RolloutTask(Prompt(7, 0, 7, TASK), 1, 16, "engine-0", 3, 60.0)
            sampling = SamplingParams(max_new_tokens=config.generator.sampling.max_new_tokens)
            client = EngineClient(task, loop.generate, sampling, config.generator.max_model_len)
            return await groups.run_group(client, SampleFailurePolicy("fail_group"))
        finally:
            await groups.close()
            await loop.close()

    receipt, columns = asyncio.run(play())
    offsets, mask = columns[schema.RESPONSE_OFFSETS], columns[schema.LOSS_MASK]
    used = [turns for turns in receipt.turns if turns > 1]
    assert 0 < len(used) < 16  # some call the calculator, some guess
    for turns, (start, end) in zip(receipt.turns, pairwise(offsets), strict=True):
        own = mask[start:end]
        assert (
            int((own[1:] < own[:-1]).sum()) == turns - 1
        )  # a tool's answer behind each other turn

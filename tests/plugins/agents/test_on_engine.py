"""A sample on the embedded engine: what is recorded is what the model computes of the whole branch."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.model import load_model
from offbeat.generators.embedded.start import Detokenizer
from offbeat.generators.engine_loop import EngineLoop
from offbeat.messages.generation import SamplingParams
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.plugins.agents.endpoint.bridges import TokenizerTemplate
from offbeat.plugins.agents.endpoint.chat import ChatMessage
from offbeat.plugins.agents.endpoint.session import Branch, ChatTurn
from offbeat.plugins.agents.endpoint.template_bridge import TemplateBridge
from offbeat.plugins.agents.factory import make_agent
from offbeat.rollouts.calls import EngineClient
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.transfer_queue import schema
from tests.support.agent_endpoint import NO_END_TOKENS, DrawnBytes, session, started_groups

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"


def engine() -> EmbeddedEngine:
    return EmbeddedEngine(
        load_model(str(TINY), torch.float32, "cpu", trust_remote_code=False),
        name="engine-0",
        incarnation="first",
        eos_token_ids=(1,),
        max_sequences=4,
        max_model_len=256,
        deterministic=False,
        seed=0,
        device="cpu",
        decode=Detokenizer(str(TINY), trust_remote_code=False),
    )


async def play(on: EmbeddedEngine) -> tuple[Branch, ...]:
    loop = EngineLoop(on)
    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    tokenizer.chat_template = NO_END_TOKENS
    sample = session(DrawnBytes(), max_new_tokens=12, max_model_len=256)
    sample = replace(
        sample,
        engine=replace(sample.engine, generate=loop.generate),
        bridge=TemplateBridge(TokenizerTemplate(tokenizer), {1: "<eos>"}),
    )
    messages = list[ChatMessage]()
    for question in ("12+34=", "and 5+6=", "or 7+8="):
        messages.append(ChatMessage("user", question))
        turn = await sample.chat(ChatTurn(tuple(messages), stop=("1", "ab")))
        messages.append(turn.answer)
    await loop.close()
    return sample.finish()


def test_the_logprobs_of_a_branch_are_those_of_a_plain_forward_pass() -> None:
    on = engine()
    branches = asyncio.run(play(on))
    trained = 0
    for branch in branches:
        transcript, prompt = branch.transcript, len(branch.prompt_ids)
        ids = torch.tensor([[*branch.prompt_ids, *transcript.token_ids]])
        with torch.inference_mode():
            scored = torch.log_softmax(on.model(input_ids=ids).logits.float(), -1)[0]
        for at, (is_trained, token) in enumerate(
            zip(transcript.mask, transcript.token_ids, strict=True)
        ):
            if is_trained:
                trained += 1
                want = float(scored[prompt + at - 1, token])
                assert transcript.logprobs[at] == pytest.approx(want, abs=1e-4)
    assert trained == on.tokens


def test_an_agent_in_its_process_is_trained_on_what_the_engine_computes() -> None:
    """The whole way: process, HTTP, embedded engine, columns."""
    on = engine()

    async def play_group() -> tuple[Receipt, Columns]:
        loop = EngineLoop(on)
        tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
        tokenizer.chat_template = NO_END_TOKENS
        recipe = EnvironmentConfig(name="agent", target="user_agents:converses", reward_workers=2)
        agent = make_agent(recipe, Path(__file__).parent)
        bridge = TemplateBridge(TokenizerTemplate(tokenizer), {1: "<eos>"})
        async with started_groups(agent, bridge) as groups:
            one = RolloutTask(Prompt(7, 0, 7, {"question": "12+34="}), 1, 3, "engine-0", 3, 60.0)
            client = EngineClient(one, loop.generate, SamplingParams(max_new_tokens=8), 256)
            played = await groups.run_group(client, SampleFailurePolicy("retry"))
        await loop.close()
        return played

    receipt, columns = asyncio.run(play_group())
    assert receipt.turns == (2, 2, 2)
    prompt = columns[schema.PROMPT_IDS].tolist()
    offsets = columns[schema.RESPONSE_OFFSETS].tolist()
    for start, end in pairwise(offsets):
        ids = torch.tensor([[*prompt, *columns[schema.RESPONSE_IDS][start:end].tolist()]])
        with torch.inference_mode():
            scored = torch.log_softmax(on.model(input_ids=ids).logits.float(), -1)[0]
        for at in range(end - start):
            if columns[schema.LOSS_MASK][start + at]:
                want = float(scored[len(prompt) + at - 1, ids[0, len(prompt) + at]])
                got = float(columns[schema.GENERATION_LOGPROBS][start + at])
                assert got == pytest.approx(want, abs=1e-4)
    assert int(columns[schema.LOSS_MASK].sum()) == on.tokens

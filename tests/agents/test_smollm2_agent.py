"""The example around SmolLM2, through the endpoint, with the model's own tokenizer and template.

Skipped without the extra agents, or without the model, which examples/smollm2 makes.
"""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="the extra agents is not installed")

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.smollm2.agent import connections, run
from offbeat.environments.environment_plugin import AgentClient
from offbeat.plugins.agents.endpoint.bridges import make_bridge
from offbeat.plugins.agents.endpoint.server import AgentEndpoint
from tests.support.agent_conversations import check_what_is_trained
from tests.support.agent_endpoint import DrawnBytes, session

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"{MODEL.name} is not there: examples/smollm2"),
]


def test_the_second_try_reads_the_first_as_it_was_drawn_in_the_models_own_format() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    said = ["It  is 11.<|im_end|>", "12<|im_end|>"]
    engine = DrawnBytes(said, encode=lambda text: tokenizer.encode(text, add_special_tokens=False))
    (engine.end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    on = session(engine, max_new_tokens=60, bridge=make_bridge(tokenizer, {}, [engine.end]))

    async def play() -> object:
        endpoint = AgentEndpoint("policy")
        await endpoint.start()
        try:
            client = AgentClient(endpoint.base_url, endpoint.open(on), "policy")
            return await run({"question": "What is 7 + 5?", "answer": "12"}, client)
        finally:
            await endpoint.close()
            await connections().aclose()

    assert asyncio.run(play()) == {"reward": 0.5, "answer": "12"}
    ask = "What is 7 + 5? Answer with the number only."
    opening = tokenizer.decode(list(engine.calls[0][0].prompt_ids))
    assert opening == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        f"<|im_end|>\n<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(list(engine.calls[1][0].prompt_ids)) == (
        f"{opening}It  is 11.<|im_end|>\n<|im_start|>user\nThat is wrong. Try again.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert len(on.turns) == 2 and on.turns[1].parent is on.turns[0]
    check_what_is_trained(on, engine)

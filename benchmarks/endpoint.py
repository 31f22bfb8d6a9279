"""Measures what the endpoint for agents costs beside the engine behind it.

- CPU of the endpoint's process per call, with an engine that answers at once: HTTP, JSON, chat
  template, tokens, records. Samples are conversations, so turns are bridged too.
- Latency of an unloaded one-token call over HTTP, beside the same request to the engine itself.

The client is a process of its own (aiohttp, one connection per conversation in progress).

    python -m benchmarks.endpoint
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import torch
from transformers import AutoTokenizer

from offbeat.endpoint.server import AgentEndpoint
from offbeat.endpoint.session import SampleSession
from offbeat.endpoint.template_bridge import TemplateBridge
from offbeat.endpoint.tokenizer_template import TokenizerTemplate
from offbeat.generators.embedded import EmbeddedEngine, load_model
from offbeat.generators.engine_loop import EngineLoop
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.rollouts.calls import EngineClient, Generate

MODEL: Final = Path(__file__).parents[1] / "models" / "tiny-addition"
MAX_MODEL_LEN: Final = 512
CHAT: Final = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{%- if add_generation_prompt %}assistant: {% endif %}"""
TASK: Final = RolloutTask(Prompt(0, 0, 0, {}), 1, 1, "engine", seed=0, deadline_s=60.0)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200, help="conversations per figure")
    parser.add_argument("--turns", type=int, default=5, help="calls per conversation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", nargs=4, metavar=("URL", "KEYS", "TURNS", "CONCURRENCY"))
    options = parser.parse_args()
    if options.client:
        url, keys, turns, concurrency = options.client
        latencies_s = asyncio.run(_converse(url, keys.split(","), int(turns), int(concurrency)))
        json.dump(latencies_s, sys.stdout)
        return
    torch.set_num_threads(1)
    asyncio.run(_measure(options.samples, options.turns, options.rounds))


async def _measure(samples: int, turns: int, rounds: int) -> None:
    loop, prompt = EngineLoop(_engine()), tuple(range(4, 28))  # as long as a first prompt
    for round_ in range(rounds):
        for concurrency in (1, 16):
            cpu_ms, _ = await _conversations(_at_once, samples, turns, concurrency)
            _print(round_, f"CPU per call, {concurrency} at once", cpu_ms)
        numbers = itertools.count()
        alone_ms = list[float]()
        for _ in range(samples):
            began_s = time.perf_counter()
            sampling = SamplingParams(max_new_tokens=1, seed=0)
            await loop.generate(GenerateRequest(f"{next(numbers)}", prompt, 1, sampling))
            alone_ms.append(1e3 * (time.perf_counter() - began_s))
        _, over_http_ms = await _conversations(loop.generate, samples, 1, 1)
        alone, over_http = statistics.median(alone_ms), statistics.median(over_http_ms)
        _print(round_, "one token, engine alone, p50", alone)
        _print(round_, "one token, over HTTP, p50", over_http)
        _print(round_, "difference", over_http - alone)
    await loop.close()


def _print(round_: int, name: str, value_ms: float) -> None:
    print(f"round {round_}  {name:32s} {value_ms:6.3f} ms", flush=True)


async def _conversations(
    generate: Generate, samples: int, turns: int, concurrency: int
) -> tuple[float, list[float]]:
    """Play conversations from a process of its own; CPU per call and the latency of each, in ms."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    tokenizer.chat_template = CHAT
    bridge = TemplateBridge(TokenizerTemplate(tokenizer), {})
    endpoint = AgentEndpoint("policy")
    await endpoint.start()
    client = EngineClient(TASK, generate, SamplingParams(max_new_tokens=1), MAX_MODEL_LEN)
    keys = [endpoint.open(SampleSession(client, bridge, number)) for number in range(samples)]
    command = ("-m", "benchmarks.endpoint", "--client", endpoint.base_url, ",".join(keys))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, str(turns), str(concurrency), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    began_s = time.process_time()
    output = await process.stdout.read()
    cpu_s = time.process_time() - began_s
    await process.wait()
    await endpoint.close()
    latencies_ms = [1e3 * each for each in json.loads(output)]
    return 1e3 * cpu_s / len(latencies_ms), latencies_ms


async def _converse(url: str, keys: list[str], turns: int, concurrency: int) -> list[float]:
    latencies_s = list[float]()
    waiting = iter(keys)

    async def agent(http: aiohttp.ClientSession) -> None:
        for key in waiting:
            messages: list[Any] = [{"role": "user", "content": "12+34="}]
            for _ in range(turns):
                body = {"model": "policy", "messages": messages}
                began_s = time.perf_counter()
                async with http.post(
                    f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
                ) as response:
                    answer = json.loads(await response.read())
                latencies_s.append(time.perf_counter() - began_s)
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "and?"}]

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(agent(http) for _ in range(concurrency)))
    return latencies_s


async def _at_once(request: GenerateRequest) -> GenerateResult:
    return GenerateResult(
        request.request_id,
        np.array([7], np.int32),
        np.array([-0.5], np.float32),
        np.array([0, 1], np.int64),
        ("length",),
        (((0, 1),),),
        "engine",
        "1",
    )


def _engine() -> EmbeddedEngine:
    return EmbeddedEngine(
        load_model(str(MODEL), torch.float32, "cpu", trust_remote_code=False),
        name="engine",
        incarnation="1",
        eos_token_ids=(),
        max_sequences=16,
        max_model_len=MAX_MODEL_LEN,
        deterministic=False,
        seed=0,
        device="cpu",
    )


if __name__ == "__main__":
    main()

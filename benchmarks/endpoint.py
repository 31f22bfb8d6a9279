"""Measures what the endpoint for agents costs beside the engine behind it.

- CPU of the endpoint's process per call, with an engine that answers at once: by tokens, without a
  chat template, and as a chat, whose turns are bridged.
- CPU of the client's process per call: OpenAI's client beside aiohttp alone.
- Samples per second of 64 new tokens through the endpoint, beside the same requests to the engine.
- Latency of an unloaded one-token call over HTTP, beside the same request to the engine itself; and
  what of each such call was spent outside of the engine, which other work on the machine moves less.

Clients are a process of their own, with one connection per conversation in progress. Both sides of
a comparison run one after the other in every round; a round has one ratio or difference, and the
figure is their median.

    python -m benchmarks.endpoint
    python -m benchmarks.endpoint --model models/smollm2-135m-instruct --new-tokens 64
"""

import argparse
import asyncio
import importlib.util
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import AutoTokenizer

from benchmarks.endpoint_client import PROMPT, Calls
from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.model import load_model
from offbeat.generators.engine_loop import EngineLoop
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.plugins.agents.endpoint.bridges import TokenizerTemplate
from offbeat.plugins.agents.endpoint.server import AgentEndpoint
from offbeat.plugins.agents.endpoint.session import SampleSession
from offbeat.plugins.agents.endpoint.template_bridge import TemplateBridge
from offbeat.rollouts.calls import EngineClient, Generate
from offbeat.testing.environments import make_result

MODEL: Final = Path(__file__).parents[1] / "models" / "tiny-addition"
MAX_MODEL_LEN: Final = 512
CHAT: Final = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{%- if add_generation_prompt %}assistant: {% endif %}"""
TASK: Final = RolloutTask(Prompt(0, 0, 0, {}), 1, 1, "engine", seed=0, deadline_s=60.0)


@dataclass(frozen=True, slots=True)
class Played:
    """Calls that were answered."""

    latencies_ms: list[float]
    wall_s: float  # from the first call to the last answer, as the client saw it
    server_cpu_ms: float  # per call
    client_cpu_ms: float  # per call


def main() -> None:
    """Measure, and print a line per round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--samples", type=int, default=100, help="conversations per figure")
    parser.add_argument("--turns", type=int, default=5, help="calls per conversation")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a sample")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(_measure(options))


async def _measure(options: argparse.Namespace) -> None:
    figures = dict[str, list[float]]()

    def record(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)
        print(f"round {len(figures[name])}  {name:52s} {value:8.3f}", flush=True)

    bench = Bench(options.model, options.samples)
    many, alone = options.concurrency, 1
    loop = EngineLoop(_engine(options.model, many))
    await loop.generate(_request("warm", options.new_tokens))
    for _ in range(options.rounds):
        for path, turns, concurrency in (
            ("tokens", 1, alone),
            ("tokens", 1, many),
            ("chat", options.turns, alone),
            ("chat", options.turns, many),
        ):
            played = await bench.over_http(
                _at_once, Calls("aiohttp", path, turns, concurrency, new_tokens=1)
            )
            record(
                f"endpoint, CPU ms per call, {path}, {concurrency} at once", played.server_cpu_ms
            )
            if (path, concurrency) == ("chat", alone):
                record("aiohttp, CPU ms per call", played.client_cpu_ms)
        if importlib.util.find_spec("openai") is not None:
            played = await bench.over_http(
                _at_once, Calls("openai", "chat", options.turns, alone, new_tokens=1)
            )
            record("openai, CPU ms per call", played.client_cpu_ms)
        direct = await bench.direct(loop, 1, alone)
        engine = _TimedEngine(loop)
        played = await bench.over_http(engine.generate, Calls("aiohttp", "tokens", 1, alone, 1))
        own_ms, over_http_ms = map(statistics.median, (direct.latencies_ms, played.latencies_ms))
        record("one token, engine alone, p50 ms", own_ms)
        record("one token, over HTTP, p50 ms more", over_http_ms - own_ms)
        outside_ms = [
            call - own for call, own in zip(played.latencies_ms, engine.latencies_ms, strict=True)
        ]
        record("one token, over HTTP, p50 ms outside of the engine", statistics.median(outside_ms))
        direct = await bench.direct(loop, options.new_tokens, many)
        played = await bench.over_http(
            loop.generate, Calls("aiohttp", "tokens", 1, many, options.new_tokens)
        )
        record(
            f"{options.new_tokens} tokens, samples/s, engine alone", options.samples / direct.wall_s
        )
        record(
            f"{options.new_tokens} tokens, samples/s, over HTTP, ratio",
            direct.wall_s / played.wall_s,
        )
        share = direct.server_cpu_ms / played.server_cpu_ms
        record(f"{options.new_tokens} tokens, samples per CPU second, ratio", share)
    await loop.close()
    print(f"\nmedian of {options.rounds} rounds (lowest to highest)")
    for name, values in figures.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name:60s} {middle:8.3f} ({low:.3f} to {high:.3f})")


class _TimedEngine:
    """Times the calls of an engine in their order, for a client that makes one at a time."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop, self.latencies_ms = loop, list[float]()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        began_s = time.perf_counter()
        try:
            return await self._loop.generate(request)
        finally:
            self.latencies_ms.append(1e3 * (time.perf_counter() - began_s))


class Bench:
    """Plays the same number of conversations over HTTP, or against the engine itself."""

    def __init__(self, model: Path, samples: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = CHAT
        self._bridge = TemplateBridge(TokenizerTemplate(tokenizer), {})
        self._samples = samples

    async def over_http(self, generate: Generate, calls: Calls) -> Played:
        """Play conversations from a process of its own."""
        endpoint = AgentEndpoint("policy")
        await endpoint.start()
        sampling = SamplingParams(max_new_tokens=calls.new_tokens)
        client = EngineClient(TASK, generate, sampling, MAX_MODEL_LEN)
        keys = [
            endpoint.open(SampleSession(client, self._bridge, number))
            for number in range(self._samples)
        ]
        told = (endpoint.base_url, ",".join(keys), json.dumps(asdict(calls)))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.endpoint_client", *told),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        began_s = time.process_time()
        output = await process.stdout.read()
        cpu_s = time.process_time() - began_s
        await process.wait()
        await endpoint.close()
        latencies_s, wall_s, client_cpu_s = json.loads(output)
        per_call_ms = 1e3 / len(latencies_s)
        latencies_ms = [1e3 * each for each in latencies_s]
        return Played(latencies_ms, wall_s, cpu_s * per_call_ms, client_cpu_s * per_call_ms)

    async def direct(self, loop: EngineLoop, new_tokens: int, concurrency: int) -> Played:
        """Send the requests of as many samples to the engine itself."""
        latencies_ms, waiting = list[float](), iter(range(self._samples))

        async def caller() -> None:
            for number in waiting:
                began_s = time.perf_counter()
                await loop.generate(_request(f"{id(waiting)}-{number}", new_tokens))
                latencies_ms.append(1e3 * (time.perf_counter() - began_s))

        began_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*(caller() for _ in range(concurrency)))
        cpu_ms = 1e3 * (time.process_time() - cpu_s) / self._samples
        return Played(latencies_ms, time.perf_counter() - began_s, cpu_ms, 0.0)


def _request(id_: str, new_tokens: int) -> GenerateRequest:
    return GenerateRequest(id_, PROMPT, 1, SamplingParams(max_new_tokens=new_tokens, seed=0))


async def _at_once(request: GenerateRequest) -> GenerateResult:
    return make_result(request.request_id, [[7]], finish_reasons=("length",))


def _engine(model: Path, max_sequences: int) -> EmbeddedEngine:
    return EmbeddedEngine(
        load_model(str(model), torch.float32, "cpu", trust_remote_code=False),
        name="engine",
        incarnation="1",
        eos_token_ids=(),
        max_sequences=max_sequences,
        max_model_len=MAX_MODEL_LEN,
        deterministic=False,
        seed=0,
        device="cpu",
    )


if __name__ == "__main__":
    main()

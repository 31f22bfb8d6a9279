"""Tokens a second of a vLLM engine actor, as environment workers call it, beside bare vLLM.

Both in turns on one engine, the first of a round being the second of the next: bare is
``AsyncLLM.generate`` called in the engine's own process, with the same prompts, samples, sampling
and form of logprobs; the actor is asked over Ray by coalesced exchanges. ``ratio`` is that of the
medians; ``load`` is the machine's, a core each, before and after.

    .venv-vllm/bin/python benchmarks/vllm_actor.py --tokens 64 --rounds 11
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from offbeat.actors.call import await_reply
from offbeat.actors.call_batching import CallBatcher
from offbeat.config.run import RunConfig
from offbeat.generators.spec import EngineSpec
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.plugins.vllm.engine_actor import VllmEngineActor

TINY = Path(__file__).parents[1] / "models" / "tiny-addition"


class Measured(VllmEngineActor):
    """An engine actor that can also be asked around all of this package."""

    async def bare(self, requests: list[GenerateRequest]) -> tuple[int, float]:
        """Tokens and seconds of these requests, without anything of ours in between."""
        vllm = self._vllm._vllm  # noqa: SLF001 - a benchmark looks inside

        async def one(request: GenerateRequest) -> int:
            asked = request.sampling
            params = vllm.SamplingParams(
                n=request.samples,
                max_tokens=asked.max_new_tokens,
                seed=asked.seed,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=vllm.RequestOutputKind.FINAL_ONLY,
            )
            prompt = vllm.TokensPrompt(prompt_token_ids=list(request.prompt_ids))
            last: Any = None
            async for output in self._vllm.llm.generate(prompt, params, request.request_id):
                last = output
            return sum(len(each.token_ids) for each in last.outputs)

        began = time.perf_counter()
        counted = await asyncio.gather(*map(one, requests))
        return sum(counted), time.perf_counter() - began

    async def serve_as_loaded(self) -> None:
        """Pretend that the weights it was started with are version 0 of a run."""
        await self._vllm.warm_up()
        await self._vllm.llm.update_weight_version("0")
        self._vllm.serve(0, 1)
        self._version = 0


def requests_of(arguments: argparse.Namespace, turn: str) -> list[GenerateRequest]:
    """Return the same prompts every turn; a sample ends early only by the model's own choice."""
    sampling = SamplingParams(max_new_tokens=arguments.tokens, seed=1)
    return [
        GenerateRequest(f"{turn}-{i}", (2, 5 + i % 50, 9, 7), arguments.samples, sampling)
        for i in range(arguments.groups)
    ]


async def measure(arguments: argparse.Namespace, engine: Any) -> dict[str, Any]:  # noqa: ANN401
    """Rounds of one turn each; the first is left out."""

    async def exchange(asked: Any, cancelled: Any, doubted: Any) -> Any:  # noqa: ANN401
        ref = engine.exchange.remote("bench", "incarnation", asked, cancelled, doubted)
        return await await_reply(ref, "engine", "generate")

    ask = CallBatcher[GenerateRequest, GenerateResult](exchange)

    async def of_bare(turn: int) -> float:
        bare = engine.bare.remote(requests_of(arguments, f"b{turn}"))
        tokens, took_s = await await_reply(bare, "engine", "bare")
        return tokens / took_s

    async def of_actor(turn: int) -> float:
        began = time.perf_counter()
        results = await asyncio.gather(*map(ask.call, requests_of(arguments, f"a{turn}")))
        return sum(len(each.token_ids) for each in results) / (time.perf_counter() - began)

    await await_reply(engine.state.remote(Fence("bench", 1)), "engine", "start")
    await await_reply(engine.serve_as_loaded.remote(), "engine", "start")
    sides = [("bare", of_bare), ("actor", of_actor)]
    speeds: dict[str, list[float]] = {name: [] for name, _ in sides}
    load = [busy_cores()]
    for turn in range(arguments.rounds + 1):
        for name, speed_of in sides:
            speed = await speed_of(turn)
            if turn:
                speeds[name].append(speed)
        sides.reverse()
    ask.close()
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    return {
        **{f"{name}_tokens_per_s": round(each) for name, each in medians.items()},
        "ratio": round(medians["actor"] / medians["bare"], 3),
        "ratios": [round(a / b, 3) for a, b in zip(speeds["actor"], speeds["bare"], strict=True)],
        "load": [*load, busy_cores()],
    }


def busy_cores() -> float:
    """Runnable processes a core, over the last minute."""
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = endless(Path(folder))
        generator = {"backend": "vllm", "vllm": {"engine_args": {"enforce_eager": True}}}
        config = RunConfig.model_validate(
            {"steps": 1, "model": {"path": str(model)}, "generator": generator}
        )
        spec = EngineSpec(
            name="generator-0",
            model=config.model,
            generator=config.generator,
            stub=config.stub,
            seed=0,
            run_dir=folder,
        )
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        engine = ray.remote(Measured).options(num_cpus=0).remote(spec)
        print(json.dumps(asyncio.run(measure(arguments, engine))))
        ray.get(engine.close.remote())
        ray.shutdown()


def endless(folder: Path) -> Path:
    """The tiny model without an end of sequence, so that both sides decode the same."""
    copy = folder / "model"
    copy.mkdir()
    for file in TINY.iterdir():
        content = file.read_bytes()
        if file.name in ("config.json", "generation_config.json"):
            content = json.dumps({**json.loads(content), "eos_token_id": None}).encode()
        (copy / file.name).write_bytes(content)
    return copy


if __name__ == "__main__":
    main()

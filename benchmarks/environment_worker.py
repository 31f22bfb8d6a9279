"""CPU per group of the environment worker's own work.

``python benchmarks/environment_worker.py``.

The engine answers at once, so that what is left is encoding, scoring, packing and checking.
"""

import asyncio
import cProfile
import pstats
import sys
import time
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from offbeat.environments.built_in import Arithmetic
from offbeat.environments.prompts import ArithmeticPrompts
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.rollouts.calls import Generate
from offbeat.rollouts.group import run_group
from offbeat.rollouts.samples import SampleFailurePolicy

SAMPLES, TOKENS, GROUPS = 16, 3, 2000
MODEL = Path(__file__).parents[1] / "models" / "tiny-addition"


def instantaneous(token_ids: list[int]) -> Generate:
    """An engine that gives the same three tokens to every sample, in no time."""
    ids = np.array(token_ids * SAMPLES, dtype=np.int32)
    logprobs = np.full(len(ids), -0.5, dtype=np.float32)
    offsets = np.arange(SAMPLES + 1, dtype=np.int64) * TOKENS

    async def generate(request: GenerateRequest) -> GenerateResult:
        return GenerateResult(
            request.request_id,
            ids,
            logprobs,
            offsets,
            ("stop",) * SAMPLES,
            (((3, TOKENS),),) * SAMPLES,
            "engine-0",
            "engine-0-a",
        )

    return generate


async def measure(environment: Arithmetic, generate: Generate, prompts: list[Prompt]) -> float:
    """Return the groups per second of CPU, one after another."""
    sampling = SamplingParams(max_new_tokens=TOKENS)
    began = time.process_time()
    for prompt in prompts:
        task = RolloutTask(prompt, 1, SAMPLES, "engine-0", 5, 60.0)
        await run_group(
            task,
            environment,
            generate,
            sampling,
            max_turns=1,
            max_model_len=64,
            policy=SampleFailurePolicy(),
        )
    return len(prompts) / (time.process_time() - began)


def main() -> None:
    """Print the best of nine; with ``--profile``, where the time goes."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    environment = Arithmetic(tokenizer)
    source = ArithmeticPrompts(0, 20, seed=0)
    began = time.process_time()
    prompts = [prompt for i in range(GROUPS) if (prompt := source.prompt(i)) is not None]
    print(f"prompt source: {GROUPS / (time.process_time() - began):,.0f} prompts/s of CPU")
    generate = instantaneous([*tokenizer.encode("12"), tokenizer.eos_token_id])
    best = max(asyncio.run(measure(environment, generate, prompts)) for _ in range(9))
    print(
        f"run_group, arithmetic, {SAMPLES} samples x {TOKENS} tokens: {best:,.0f} groups/s of CPU, "
        f"{1e6 / best:.1f} µs per group"
    )
    if "--profile" in sys.argv:
        with cProfile.Profile() as profile:
            asyncio.run(measure(environment, generate, prompts))
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()

"""What the performance gate measures, on the tree that is imported: a server for ``benchmarks.gate``.

The gate runs this one file on both sides, so it imports only what the pinned commit has too. Each
case prepares itself and returns a function that does the work once and returns how many units it
did. Requests come line by line: ``run NAME`` replies its CPU seconds and units, ``prepare NAME`` 0 and 0.
"""
# ruff: noqa: PLC0415 - a case imports only what it measures

import asyncio
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

import structlog

import offbeat

Work = Callable[[], int]


def prepare_controller() -> Work:
    """Prepare a run of no-op ports with a journal on disk; a unit is one run."""
    from benchmarks.controller import Case, measure

    def work() -> int:
        measure(Case(steps=30, warm=3))
        return 1

    return work


def prepare_environment_worker() -> Work:
    """Prepare groups of one-turn arithmetic against an engine that answers at once."""
    from transformers import AutoTokenizer

    from benchmarks.environment_worker import MODEL, instantaneous, measure
    from offbeat.environments.prompts import ArithmeticPrompts

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    environment, source = (
        _import_arithmetic().Arithmetic(tokenizer),
        ArithmeticPrompts(0, 20, seed=0),
    )
    prompts = [prompt for index in range(1000) if (prompt := source.prompt(index)) is not None]
    generate = instantaneous([*tokenizer.encode("12"), tokenizer.eos_token_id])

    def work() -> int:
        asyncio.run(measure(environment, generate, prompts))
        return len(prompts)

    return work


def prepare_queue_index() -> Work:
    """Prepare an index of 10,000 groups; others are put, read and cleared, 16 at once."""
    from offbeat.transfer_queue.index import QueueIndex

    depth, groups, at_once = 10_000, 48_000, 16
    columns = ("prompt", "tokens", "mask", "logprobs", "versions", "rewards")
    index = QueueIndex()
    for prompt_index in range(depth):
        index.put(prompt_index, 1, columns, 1 << 18, None)
    first = 0

    def work() -> int:
        nonlocal first
        end = first + groups
        while first < end:
            oldest = range(first, first + at_once)
            for prompt_index in oldest:
                index.put(prompt_index + depth, 1, columns, 1 << 18, None)
                index.payloads(prompt_index)
            index.clear(oldest)
            first += at_once
        return groups

    return work


def prepare_simulator() -> Work:
    """Prepare episodes under all faults; a unit is a callback, because draws differ by tree."""
    from offbeat.config.loader import load_recipe

    run_episode = _import_episode().run_episode
    base = load_recipe("recipes/quickstart.yaml").config

    def work() -> int:
        return sum(run_episode(seed, base).events for seed in range(4))

    return work


def _import_arithmetic() -> ModuleType:
    """Return the module of the built-in task: the pinned commit has it by itself."""
    from offbeat import environments

    folder = Path(environments.__path__[0])
    name = "built_in" if (folder / "built_in.py").is_file() else "arithmetic"
    return import_module(f"offbeat.environments.{name}")


def _import_episode() -> ModuleType:
    """Import the module of episodes. The pinned commit has it in another room."""
    tree = Path(offbeat.__file__).parent  # an installed package may have the other room
    room = "plugins.simulation" if (tree / "plugins").is_dir() else "simulation"
    return import_module(f"offbeat.{room}.episode")


def prepare_engine() -> Work:
    """Prepare the embedded engine with 64 sequences of a tiny model; a unit is a token."""
    import torch

    from benchmarks.engine import tiny_model
    from offbeat.generators.embedded.engine import EmbeddedEngine
    from offbeat.messages.generation import GenerateRequest, SamplingParams

    torch.set_num_threads(1)
    engine = EmbeddedEngine(
        tiny_model(),
        name="engine",
        incarnation="1",
        eos_token_ids=(),
        max_sequences=64,
        max_model_len=512,
        deterministic=False,
        seed=0,
        device="cpu",
    )

    def work() -> int:
        before = engine.tokens
        for number in range(16):
            sampling = SamplingParams(max_new_tokens=64)
            engine.submit(GenerateRequest(str(number), (1, 2, 3, 4, 5), 4, sampling))
        while engine.has_work:
            engine.step()
        return engine.tokens - before

    return work


def prepare_trainer() -> Work:
    """Prepare split steps of short groups that share their prompt; a unit is a step."""
    import torch

    from benchmarks.trainer import SHARED, make_sides
    from benchmarks.trainer_cases import SHORT, write_model
    from benchmarks.trainer_sides import Setting

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(SHORT.model, Path(directory) / SHORT.model)
        sides, groups, advantages = make_sides(SHORT, Setting(model, "cpu", "float32", 8192))

    def work() -> int:
        for _ in range(3):
            sides[SHARED].step(groups, advantages)
        return 3

    return work


CASES: Final[Mapping[str, Callable[[], Work]]] = {
    "controller": prepare_controller,
    "environment worker": prepare_environment_worker,
    "queue index": prepare_queue_index,
    "simulator": prepare_simulator,
    "engine": prepare_engine,
    "trainer": prepare_trainer,
}


def main() -> None:
    """Serve requests until the input ends."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    prepared = dict[str, Work]()
    for line in sys.stdin:
        request, name = line.strip().split(maxsplit=1)
        seconds, units = 0.0, 0
        if request == "prepare":
            prepared[name] = CASES[name]()
            prepared[name]()  # the first run fills caches
        else:
            gc.collect()
            began_s = time.process_time()
            units = prepared[name]()
            seconds = time.process_time() - began_s
        print(seconds, units, flush=True)


if __name__ == "__main__":
    main()

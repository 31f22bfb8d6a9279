"""Finds recipes that need several processes, and says how to run them on Ray."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.limits import trainer_ranks
from offbeat.config.mixture import environment_workers
from offbeat.config.run import RunConfig

_ON_RAY = "Leave runtime.backend out, to run on Ray"


def local_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield everything that a run in one process cannot do; a dry run replaces it by stubs."""
    if config.runtime.backend != "local":
        return
    if (workers := environment_workers(config)) > 1:
        yield _clash(
            "environment.workers",
            workers,
            "one worker serves all groups of a process",
            "set environment.workers to 1",
        )
    if config.sync.transport != "object_store":
        yield _clash(
            "sync.transport",
            config.sync.transport,
            "engines read the trainer's release from memory of their process",
            "leave sync.transport out",
        )
    if config.generator.backend == "vllm":
        yield _clash(
            "generator.backend",
            "vllm",
            "vLLM starts processes and patches torch in its own",
            "set generator.backend to embedded",
        )
    if config.trainer.backend == "megatron":
        yield _clash(
            "trainer.backend",
            "megatron",
            "its global state belongs to one process per rank",
            "set trainer.backend to torch",
        )
    elif (ranks := trainer_ranks(config)) > 1:
        yield Clash(
            ("runtime.backend", "trainer.data_parallel", "trainer.tensor_parallel"),
            f"runtime.backend=local cannot run {ranks} trainer ranks: each rank is a process",
            f"{_ON_RAY}, or set trainer.data_parallel and trainer.tensor_parallel to 1 and leave "
            "trainer.encoder out.",
        )


def _clash(key: str, value: object, problem: str, fix: str) -> Clash:
    return Clash(
        ("runtime.backend", key),
        f"runtime.backend=local cannot run with {key}={value}: {problem}",
        f"{_ON_RAY}, or {fix}.",
    )

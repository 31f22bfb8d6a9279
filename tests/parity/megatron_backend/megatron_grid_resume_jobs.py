"""Runs of a grid beside megatron-core that are cut and go on. Runs in workers only."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron_cases import JobStep
from megatron_grid_jobs import feed, make, with_library
from parity_cases import MegatronCut as Cut

from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.peers import Peers


def run(peers: Peers, name: str, arguments: dict[str, Any]) -> Any:
    return with_library(peers, globals()[name], arguments)


def taken(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: JobStep,
    *,
    encoders: int,
    count: int,
    load: Path | None = None,
    save: Path | None = None,
) -> list[str]:
    """The digests of the weights before and after each of so many steps, from a state on."""
    trainer = make(peers, path, cut, encoders)
    if load is not None:
        trainer.load_state(load)
    digests = [trainer.weights_digest()]
    for _ in range(count):
        number = trainer.steps_applied + 1
        key = feed(trainer, step, 2, StepKey(number, number, 0), cut, encoders)
        assert trainer.finish_train_step(key).applied
        digests.append(trainer.weights_digest())
    if save is not None:
        trainer.save_state(save)
        dist.barrier()
    return digests

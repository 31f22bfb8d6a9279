"""A split step of a torch trainer, as the controller would call it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import StepKey
from offbeat.messages.training import StepResult
from offbeat.trainers.torch import TorchTrainer

MakeTrainer = Callable[..., TorchTrainer]
Step = tuple[list[dict[str, Any]], list[tuple[float, ...]]]


def run_step(
    trainer: TorchTrainer, step: Step, loss: LossSpec, chunks: int, number: int = 1
) -> StepResult:
    groups, advantages = step
    key = StepKey(number, number, 0)
    trainer.begin_train_step(key, loss)
    for part in np.array_split(np.arange(len(groups)), chunks):
        key = key.next()
        trainer.train_microbatch(key, [groups[i] for i in part], [advantages[i] for i in part])
    return trainer.finish_train_step(key.next())

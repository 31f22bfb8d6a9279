"""What ranks are asked to do with weights of 16 bits and float32 masters. Runs in workers only."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron_cases import JobStep
from megatron_grid_jobs import ENCODER, LANGUAGE, feed, make, with_library
from megatron_jobs import as_arrays
from parity_cases import Cut as TorchCut
from parity_cases import MegatronCut as Cut
from torch import Tensor
from torch_backend import grid_jobs
from torch_backend.torch_bugs import PlantedUpdates

from offbeat.messages.fences import StepKey
from offbeat.plugins.encoder_ranks.megatron.encoder import MegatronEncoderTrainer
from offbeat.plugins.encoder_ranks.megatron.language import LanguageSide
from offbeat.plugins.megatron.optimizer import MASTER
from offbeat.trainers.ranks.peers import Peers


class ForgetsMasters(MegatronEncoderTrainer):
    """Rounds what it has updated to the 16 bits that passes compute with."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.updates = RoundingUpdates(self._tower.shards.values(), self.updates)


class RoundingUpdates(PlantedUpdates):
    def __init__(self, masters: Collection[Tensor], updates: Any) -> None:
        super().__init__(updates, lambda denominator: denominator)
        self._masters = masters

    def step(self, denominator: float, rate: float) -> Any:
        result = super().step(denominator, rate)
        with torch.no_grad():
            for each in self._masters:
                each.copy_(each.bfloat16())
        return result


def run(peers: Peers, name: str, arguments: dict[str, Any]) -> Any:
    return with_library(peers, globals()[name], arguments)


def of_grid(
    peers: Peers, path: Path, cut: Cut, encoders: int, step: JobStep, count: int, bug: str = ""
) -> dict[str, Any]:
    """How far so many steps move the masters; their results; and whether passes compute with those."""
    encoders_by_name = {**ENCODER, "ForgetsMasters": ForgetsMasters}
    language = LANGUAGE.get(bug, LanguageSide)
    encoder = encoders_by_name.get(bug, MegatronEncoderTrainer)
    trainer = make(peers, path, cut, encoders, language, encoder)

    def masters() -> dict[str, Tensor]:
        return dict(trainer.gathering.all_tensors(trainer.optimizer.state()[MASTER]))

    before, results = masters(), list[Any]()
    for number in range(1, count + 1):
        key = feed(trainer, step, 2, StepKey(number, number, 0), cut, encoders)
        results.append(trainer.finish_train_step(key))
    after, weights = masters(), dict(trainer.iterate_weights())
    rounded = all(torch.equal(weights[name], each.bfloat16()) for name, each in after.items())
    return {"moved": _moved(before, after), "results": results, "rounded": rounded}


def of_torch(peers: Peers, path: Path, dtype: str, step: JobStep, count: int) -> dict[str, Any]:
    """As ``of_grid``, of one process of the torch trainer, in this dtype."""
    cut = TorchCut(dtype=dtype)
    trainer = grid_jobs.make(peers, path, cut, (), lanes=1, encoders=0)

    def masters() -> dict[str, Tensor]:
        kept = trainer.updates.masters() or dict(trainer.iterate_weights())
        return {name: each.detach().clone() for name, each in kept.items()}

    before, results = masters(), list[Any]()
    for number in range(1, count + 1):
        key = grid_jobs.feed(trainer, step, step.loss, 2, StepKey(number, number, 0))
        results.append(trainer.finish_train_step(key))
    return {"moved": _moved(before, masters()), "results": results}


def _moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Any]:
    return as_arrays({name: after[name].double() - before[name].double() for name in before})

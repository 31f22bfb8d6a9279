"""Grids beside megatron-core in which one thing fails, once, on some ranks. Runs in workers only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron_bugs import main_grads
from megatron_cases import JobStep
from megatron_grid_jobs import feed, make, with_library
from parity_cases import MegatronCut as Cut
from side_faults import FaultySide, FaultyTower
from torch import Tensor
from torch_backend.torch_bugs import Injected, PlantedUpdates

from offbeat.messages.fences import StepKey
from offbeat.plugins.encoder_ranks.errors import BridgeMismatch
from offbeat.plugins.encoder_ranks.megatron.encoder import MegatronEncoderTrainer
from offbeat.plugins.megatron.megatron_trainer import MegatronTrainer
from offbeat.trainers.ranks.peers import PeerFailed, Peers, WorldBroken
from offbeat.trainers.torch.sharding import own


def run(peers: Peers, name: str, arguments: dict[str, Any]) -> Any:
    return with_library(peers, globals()[name], arguments)


class Spoiled(FaultySide):
    """Trainer of one side whose gradients may be spoiled before they are applied."""

    updates: Any

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.updates = PlantedUpdates(self.updates, self.spoil)

    def spoil(self, denominator: float) -> float:
        self.faults.spoil(gradients_of(self))
        return denominator


class FaultyEncoder(Spoiled, MegatronEncoderTrainer):
    passes_kind = FaultyTower


class FaultyLanguage(Spoiled, MegatronTrainer):
    pass


def faulty(peers: Peers, path: Path, cut: Cut, encoders: int) -> Any:
    return make(peers, path, cut, encoders, encoder=FaultyEncoder, kind=FaultyLanguage)


def gradients_of(trainer: Any) -> list[Tensor]:
    """This rank's gradients; megatron-core has buffers of zeros where there are none."""
    if isinstance(trainer, MegatronTrainer):
        return list(main_grads(trainer.model).values())
    parameters = trainer._tower.model.parameters()  # noqa: SLF001 -- no public place has them
    return [own(each.grad) for each in parameters if each.grad is not None]


def state_of(trainer: Any) -> dict[str, Tensor]:
    """Copies of weights, float32 masters and moments of this rank, and the numbers of updates."""
    kinds = {"weights": trainer.model_state.local_weights, **trainer.optimizer.state()}
    held = {
        f"{kind} of {name}": each for kind, named in kinds.items() for name, each in named.items()
    }
    counts = torch.tensor([trainer.optimizer.steps, trainer.steps_applied])
    return {name: own(each.detach()).clone() for name, each in held.items()} | {"updates": counts}


def failed_then_retried(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: JobStep,
    *,
    encoders: int,
    site: str,
    on: Sequence[int],
) -> tuple[str, bool, str]:
    """What the second of three attempts raised, whether anything was left of it, and the digest.

    The first attempt and the third make a step each.
    """
    trainer, shape = faulty(peers, path, cut, encoders), (cut, encoders)
    trainer.finish_train_step(feed(trainer, step, 2, StepKey(1, 1, 0), *shape))
    before = state_of(trainer)
    trainer.faults.site = site if peers.rank in on else ""
    raised = ""
    try:
        feed(trainer, step, 2, StepKey(2, 2, 0), *shape)
    except (Injected, PeerFailed, BridgeMismatch) as error:
        raised = type(error).__name__
    trainer.abort_train_step(StepKey(2, 2, 0))
    after = state_of(trainer)
    left = any(bool(each.any()) for each in gradients_of(trainer)) or any(
        not torch.equal(before[name], after[name]) for name in before
    )
    trainer.finish_train_step(feed(trainer, step, 2, StepKey(2, 3, 0), *shape))
    return raised, left, trainer.weights_digest()


def raised(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: JobStep,
    *,
    encoders: int,
    site: str,
    on: Sequence[int],
) -> str:
    """What a step raised on this rank; ranks that fail leave the world with it."""
    trainer = faulty(peers, path, cut, encoders)
    trainer.faults.site = site if peers.rank in on else ""
    try:
        feed(trainer, step, 1, StepKey(1, 1, 0), cut, encoders)
    except Exception as error:  # noqa: BLE001 -- the test judges it
        if peers.are_lost(error) or peers.are_lost(cause_of(error)):
            return "lost"
        return f"{type(error).__name__} of {type(cause_of(error)).__name__}"
    return ""


def cause_of(error: Exception) -> Exception:
    """The error itself, or what a stage of a pipeline raised before the world was declared broken."""
    cause = error.__cause__
    return cause if isinstance(error, WorldBroken) and isinstance(cause, Exception) else error


def refused(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: JobStep,
    *,
    encoders: int,
    site: str,
    on: Sequence[int],
) -> tuple[list[tuple[bool, str]], list[str]]:
    """Outcomes of three steps, and what the second, which meets the fault, changed of this rank."""
    trainer = faulty(peers, path, cut, encoders)
    outcomes, changed = list[tuple[bool, str]](), list[str]()
    for attempt in (1, 2, 3):
        before = state_of(trainer)
        trainer.faults.site = site if attempt == 2 and peers.rank in on else ""
        key = StepKey(trainer.steps_applied + 1, attempt, 0)
        result = trainer.finish_train_step(feed(trainer, step, 2, key, cut, encoders))
        outcomes.append((result.applied, result.reason))
        if not result.applied:
            after = state_of(trainer)
            assert before.keys() == after.keys()
            changed += [name for name in before if not torch.equal(before[name], after[name])]
    return outcomes, changed

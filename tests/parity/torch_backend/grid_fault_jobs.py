"""Grids in which one thing fails, once, on some ranks. Runs in workers only."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from parity_cases import TOKENS, Cut, Step
from side_faults import FaultySide, FaultyTower
from torch import Tensor
from torch_backend.grid_jobs import ExactEncoder, ExactLanguage, feed, make
from torch_backend.torch_bugs import Injected

from offbeat.messages.fences import StepKey
from offbeat.plugins.encoder_ranks.bridge import Bridge, Header, Kind
from offbeat.plugins.encoder_ranks.errors import BridgeMismatch
from offbeat.trainers.ranks.peers import PeerFailed, Peers
from offbeat.trainers.torch.sharding import own


class FaultyEncoder(FaultySide, ExactEncoder):
    Encoder = FaultyTower

    def before_update(self, denominator: float) -> float:
        self.faults.spoil(gradients_of(self))
        return denominator


class FaultyLanguage(FaultySide, ExactLanguage):
    def before_update(self, denominator: float) -> float:
        self.faults.spoil(gradients_of(self))
        return denominator


def gradients_of(trainer: Any) -> list[Tensor]:
    gradients = (each.grad for each in trainer.module.parameters())
    return [own(each) for each in gradients if each is not None]


def faulty(peers: Peers, path: Path, cut: Cut, lanes: int, encoders: int) -> Any:
    return make(
        peers, path, cut, (), lanes, encoders, language=FaultyLanguage, encoder=FaultyEncoder
    )


def failed_then_retried(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    *,
    lanes: int,
    encoders: int,
    site: str,
    on: Sequence[int],
) -> tuple[str, bool, str]:
    """What the second of three attempts raised, whether a gradient was left of it, and the digest.

    The first attempt and the third make a step each.
    """
    trainer = faulty(peers, path, cut, lanes, encoders)
    trainer.finish_train_step(feed(trainer, step, TOKENS, 2, StepKey(1, 1, 0)))
    trainer.faults.site = site if peers.rank in on else ""
    raised = ""
    try:
        feed(trainer, step, TOKENS, 2, StepKey(2, 2, 0))
    except (Injected, PeerFailed, BridgeMismatch) as error:
        raised = type(error).__name__
    trainer.abort_train_step(StepKey(2, 2, 0))
    left = any(each.grad is not None for each in trainer.module.parameters())
    trainer.finish_train_step(feed(trainer, step, TOKENS, 2, StepKey(2, 3, 0)))
    return raised, left, trainer.weights_digest()


def raised(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    *,
    lanes: int,
    encoders: int,
    site: str,
    on: Sequence[int],
) -> str:
    """What a step raised on this rank; ranks that fail leave the world with it."""
    trainer = faulty(peers, path, cut, lanes, encoders)
    trainer.faults.site = site if peers.rank in on else ""
    try:
        feed(trainer, step, TOKENS, 1, StepKey(1, 1, 0))
    except Exception as error:  # noqa: BLE001 -- the test judges it
        if peers.are_lost(error):
            return "lost"
        return type(error).__name__
    return ""


def refused(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    *,
    lanes: int,
    encoders: int,
    site: str,
    on: Sequence[int],
) -> tuple[list[tuple[bool, str]], list[str], str]:
    """Outcomes of three steps, what the second changed of this rank's state, and the digest.

    The second step meets the fault, and the third is the step that it was.
    """
    trainer = faulty(peers, path, cut, lanes, encoders)
    outcomes, changed = list[tuple[bool, str]](), list[str]()
    for attempt in (1, 2, 3):
        before = {name: own(each).clone() for name, each in trainer.model_state.tensors().items()}
        trainer.faults.site = site if attempt == 2 and peers.rank in on else ""
        key = StepKey(trainer.steps_applied + 1, attempt, 0)
        result = trainer.finish_train_step(feed(trainer, step, TOKENS, 2, key))
        outcomes.append((result.applied, result.reason))
        if not result.applied:
            after = {name: own(each) for name, each in trainer.model_state.tensors().items()}
            assert before.keys() == after.keys()
            changed += [name for name in before if not torch.equal(before[name], after[name])]
    return outcomes, changed, trainer.weights_digest()


def late_message(peers: Peers) -> list[float] | None:
    """Values of the message that is due, after one of an aborted attempt; None on the sender."""
    due = Header(7, 3, Kind.FEATURES, 0, 99, 0, 4, 0, 0)
    ends = Bridge(peers.rank, torch.device("cpu"))
    if peers.rank == 0:
        return ends.receive(due, 1).flatten().tolist()
    ends.send(replace(due, exchange=6, provenance=98), torch.zeros(2, 9, 8), 0)
    ends.send(due, torch.ones(1, 4, 2), 0)
    return None

"""Ranks of one replica of which one fails, or computes what is not finite. Runs in workers only."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from parity_cases import TOKENS, Cut, Step
from torch_backend.torch_bugs import Exact, Failing
from torch_jobs import feed, make

from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch.sharding import own

DIVIDED, COPIED = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"


class Spoiled(Exact):
    """One step has a value that is not finite: in a loss, or in the gradient of some weight."""

    place, value = "", 0.0

    def _loss(self, *given: Any) -> Any:
        sums = super()._loss(*given)
        if self.place != "loss":
            return sums
        self.place = ""
        return replace(sums, loss=sums.loss * self.value)

    def before_update(self, denominator: float) -> float:
        found = dict(self._model.named_parameters()).get(self.place)
        self.place = ""
        if found is not None:
            assert found.grad is not None
            own(found.grad).view(-1)[-1] = self.value
        return denominator


def raised(peers: Peers, path: Path, cut: Cut, step: Step, site: str, on: Sequence[int]) -> str:
    """What a step raised on this rank; ranks that fail leave the world with it."""
    trainer = make(peers, path, cut, Failing)
    trainer.watch()
    trainer.arm(site, on, after=0)
    try:
        feed(trainer, step, TOKENS, 1, StepKey(1, 1, 0))
    except Exception as error:  # noqa: BLE001 -- the test judges it
        return "lost" if peers.are_lost(error) else type(error).__name__
    return ""


def refused(
    peers: Peers, path: Path, cut: Cut, step: Step, place: str, value: float, on: Sequence[int]
) -> tuple[list[tuple[bool, str]], list[str], str]:
    """Outcomes of three steps, what the second changed of this rank's state, and the digest.

    The second step meets the value, and the third is the step that it was.
    """
    trainer = make(peers, path, cut, Spoiled)
    outcomes, changed = list[tuple[bool, str]](), list[str]()
    for attempt in (1, 2, 3):
        before = {name: own(each).clone() for name, each in trainer.model_state.tensors().items()}
        if attempt == 2 and peers.rank in on:
            trainer.place, trainer.value = place, value
        key = StepKey(trainer.steps_applied + 1, attempt, 0)
        result = trainer.finish_train_step(feed(trainer, step, TOKENS, 2, key))
        outcomes.append((result.applied, result.reason))
        if not result.applied:
            after = {name: own(each) for name, each in trainer.model_state.tensors().items()}
            assert before.keys() == after.keys()
            changed += [name for name in before if not torch.equal(before[name], after[name])]
    return outcomes, changed, trainer.weights_digest()

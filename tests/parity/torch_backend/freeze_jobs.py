"""What the ranks of a world are asked to do with frozen parameters. Runs in workers only."""

from pathlib import Path
from typing import Any

from parity_cases import TOKENS, Cut, Outcome, Step
from reshard_jobs import resharded
from torch_backend.torch_bugs import Exact
from torch_jobs import as_arrays, balanced, feed, gradients, make, outcome

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch.sharding import own

FROZEN = ("model.embed_tokens.*", "model.layers.0.*", "*norm.weight")
"""A part of the rest of the model, a whole layer, and a part of another one."""
FROZEN_EXPERTS = (*FROZEN, "model.layers.1.*")
"""The first layer of experts of GLM-4 MoE, too."""


class Freezing(Exact):
    """With some parameters frozen."""

    patterns = FROZEN

    def __init__(self, path: Path, *, trainer: Any, **given: Any) -> None:
        frozen = trainer.model_copy(update={"freeze": self.patterns})
        super().__init__(path, trainer=frozen, **given)


class FreezingExperts(Freezing):
    """With a layer of experts frozen, too."""

    patterns = FROZEN_EXPERTS


def trained(
    peers: Peers, path: Path, cut: Cut, step: Step, root: Path, load: Path | None = None
) -> dict[str, Any]:
    """Load a state or start anew, take a step, and save; return what a test compares."""
    trainer: Any = make(peers, path, cut, Freezing)
    seen: dict[str, Any] = {"initial": trainer.weights_digest(), "identity": trainer.identity}
    if load is not None:
        trainer.load_state(load)
        seen["loaded"] = trainer.weights_digest()
    before = as_arrays(dict(trainer.iterate_weights()))
    number = trainer.steps_applied + 1
    key = feed(trainer, step, TOKENS, 2, StepKey(number, number, 0))
    seen["gradients"] = gradients(trainer)
    seen["result"] = trainer.finish_train_step(key)
    after = as_arrays(dict(trainer.iterate_weights()))
    seen["moved"] = {name for name in after if (after[name] != before[name]).any()}
    seen["digest"], seen["weights"] = trainer.weights_digest(), after
    named = trainer.module.named_parameters()
    seen["frozen"] = {str(own(each).dtype) for _, each in named if not each.requires_grad}
    moments = (name for name in trainer.model_state.tensors() if name.startswith("exp_avg/"))
    seen["moments"] = {name.removeprefix("exp_avg/") for name in moments}
    weights = trainer.weights
    seen["resharded"], _ = resharded(
        peers, weights.metas(), trainer.held_regions(), trainer.iterate_weights()
    )
    trainer.save_state(root / "state")
    trainer.reset()
    seen["after reset"] = trainer.weights_digest()
    return seen


def stepped(
    peers: Peers, path: Path, cut: Cut, step: Step, loss: LossSpec
) -> tuple[Outcome, set[str]]:
    """A step of several optimizer steps, and the names of what it has changed."""
    trainer: Any = make(peers, path, cut, Freezing)
    before = as_arrays(dict(trainer.iterate_weights()))
    result = trainer.finish_train_step(feed(trainer, step, loss, 2, StepKey(1, 1, 0)))
    after = outcome(trainer, result, {})
    moved = {name for name in before if (after.weights[name] != before[name]).any()}
    return after, moved


def balanced_steps(peers: Peers, path: Path, cut: Cut, step: Step, loss: LossSpec) -> list[Outcome]:
    """As ``torch_jobs.balanced``, with a frozen layer of experts."""
    return balanced(peers, path, cut, step, loss, FreezingExperts)

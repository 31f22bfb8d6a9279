"""What the ranks of a world are asked to do with an image-text model. Runs in workers only."""

from pathlib import Path
from typing import Any

from parity_cases import TOKENS, Cut, Step
from torch_backend.torch_bugs import Exact
from torch_jobs import as_arrays, feed, gradients, make

from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.peers import Peers

TOWER = ("model.vision_model.*", "model.connector.*")


class FrozenTower(Exact):
    """With a vision tower that is not trained."""

    def __init__(self, path: Path, *, trainer: Any, **given: Any) -> None:
        super().__init__(path, trainer=trainer.model_copy(update={"freeze": TOWER}), **given)


def trained(
    peers: Peers, path: Path, cut: Cut, step: Step, root: Path, *, frozen: bool
) -> dict[str, Any]:
    """Take a step, save its state, load it again, and export; return what a test compares."""
    trainer: Any = make(peers, path, cut, FrozenTower if frozen else Exact)
    first = feed(trainer, step, TOKENS, 2, StepKey(1, 1, 0))
    seen: dict[str, Any] = {"gradients": gradients(trainer)}
    trainer.finish_train_step(first)
    seen["weights"] = as_arrays(dict(trainer.iterate_weights()))
    seen["digest"] = trainer.weights_digest()
    trainer.save_state(root / "state")
    trainer.save(root / "export")
    trainer.reset()
    seen["after reset"] = trainer.weights_digest()
    trainer.load_state(root / "state")
    seen["loaded"] = trainer.weights_digest()
    return seen

"""Parts of a torch trainer that a plug-in exchanges.

How its model is made, which weights it trains, how it passes microbatches, and what it saves.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.parts import Passes
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch.loading import ModelLoader
from offbeat.trainers.torch.model import identity
from offbeat.trainers.torch.passes import TorchPasses
from offbeat.trainers.torch.sharding import Weights
from offbeat.trainers.torch.state import TorchState
from offbeat.trainers.weights import TrainedWeights

Exported = tuple[Iterator[tuple[str, Tensor]], Callable[[Path], None]]
"""Weights of an export, and a function that writes other files into its directory."""


class TrainedParameters(ABC):
    """Weights of a model that are trained: their names, their identity and their export.

    ``add_to`` is called for each model, ``identify`` and ``hold`` once, in this order.
    """

    def __init__(self, trainer: TorchTrainerConfig, model_path: Path, peers: Peers) -> None:
        """Load nothing yet.

        Args:
            trainer: The section of the recipe.
            model_path: Hugging Face directory of the model.
            peers: The ranks of the world.
        """
        self.trainer, self.model_path, self.peers = trainer, model_path, peers

    @property
    def base(self) -> str:
        """Return the digest of the frozen model next to which these are trained; empty without one.

        All ranks call it together for the first time.
        """
        return ""

    def add_to(self, model: PreTrainedModel) -> None:
        """Add what is trained next to a model, which may be without memory. By default nothing.

        Raises:
            UntrainableModel: The model takes none.
        """
        del model

    @abstractmethod
    def identify(self, model: PreTrainedModel) -> Identity:
        """Return the identity of the state, equal for any number of ranks. All ranks call it together."""

    @abstractmethod
    def hold(self, model: PreTrainedModel, every: Weights) -> None:
        """Find the weights in a model, which is sharded if there are several ranks.

        Args:
            model: The model that is trained.
            every: All of its weights.
        """

    @property
    @abstractmethod
    def weights(self) -> TrainedWeights:
        """Return the weights that are trained."""

    @abstractmethod
    def export(self) -> Exported:
        """Return the weights of an export, and a function that writes other files into its directory."""

    def restore(self) -> bool:
        """Restore the weights as they were first; return whether that needs no file."""
        return False

    def proving(self) -> AbstractContextManager[None]:
        """Return a context in which no weight has a gradient of zero because of another."""
        return nullcontext()

    def as_served(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes, without gradients, as engines do."""
        return nullcontext()

    def as_base(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes as the frozen model does."""
        return nullcontext()


class WholeModel(TrainedParameters):
    """All weights of a model except the ones that ``trainer.freeze`` names."""

    def identify(self, model: PreTrainedModel) -> Identity:
        return identity(model)

    def hold(self, model: PreTrainedModel, every: Weights) -> None:
        del model
        self._every = every

    @property
    def weights(self) -> TrainedWeights:
        """Return the weights under their Hugging Face names."""
        return self._every

    def export(self) -> Exported:
        return self._every.named(), lambda _: None


def keep_passes(passes: TorchPasses, _: ModelLoader, __: Callable[[], int]) -> TorchPasses:
    """Return the passes as they are."""
    return passes


@dataclass(frozen=True, slots=True)
class TorchParts:
    """Parts that a torch trainer is assembled from; a plug-in replaces one of them."""

    loader: Callable[..., ModelLoader] = ModelLoader
    trained: Callable[[TorchTrainerConfig, Path, Peers], TrainedParameters] = WholeModel
    state: Callable[..., TorchState] = TorchState
    passes: Callable[[TorchPasses, ModelLoader, Callable[[], int]], Passes[Any]] = keep_passes
    """(passes, loader of their model, number of the next step) -> passes that wrap them."""

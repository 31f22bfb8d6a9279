"""Parts of a torch trainer if the vision tower has separate ranks."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offbeat.config.limits import encoder_tokens
from offbeat.plugins.encoder_ranks.bridge import Exchange
from offbeat.plugins.encoder_ranks.encoding import EncoderPasses
from offbeat.plugins.encoder_ranks.lane import LanePasses
from offbeat.plugins.encoder_ranks.loading import GridLoader
from offbeat.trainers.parts import Passes
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.loading import ModelLoader
from offbeat.trainers.torch.optimizer import STEPS
from offbeat.trainers.torch.passes import TorchPasses
from offbeat.trainers.torch.state import TorchState


def wrap_passes(
    passes: TorchPasses,
    loader: ModelLoader,
    next_step: Callable[[], int],
    *,
    encoder: type[EncoderPasses] = EncoderPasses,
    lane: type[LanePasses] = LanePasses,
) -> Passes[Any]:
    """Wrap the passes of a rank that holds one side of a model in exchanges with the other side.

    Ranks that share matrices of the language model read the same features. One of these ranks
    receives the features; each rank has the whole gradient of the features.

    Args:
        passes: The passes of the side's model.
        loader: Loader of the model.
        next_step: Returns the number of the next step.
        encoder: Passes of a rank of the tower.
        lane: Passes of a rank of the language model.
    """
    side = _sides(loader)
    exchange = Exchange(side.trainer, side.peers, next_step)
    trained, mesh = side.inventory.is_trained(Side.TOWER), side.mesh
    if side.side is Side.TOWER:
        return encoder(passes, exchange, mesh, encoder_tokens(side.trainer), trained=trained)
    group = None if mesh.tensor is None else mesh.tensor.get_group()
    wrapped = lane(passes, exchange, group, trained=trained)
    passes.features_of = lambda _, media: wrapped.read_features(media)
    return wrapped


def _sides(loader: ModelLoader) -> GridLoader:
    assert isinstance(loader, GridLoader)  # noqa: S101 -- encoder ranks replace both
    return loader


class GridState(TorchState):
    """State of a model if a rank holds only one side."""

    @property
    def parameters(self) -> int:
        return _sides(self.loader).inventory.parameters

    @property
    def nbytes(self) -> int:
        """Estimate the bytes of both sides' state. The first rank checks for room for all of it."""
        return _sides(self.loader).inventory.state_nbytes

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save. The update counts cover both sides, on all ranks."""
        state = super().tensors()
        updates: list[float] = state[STEPS].tolist()
        own = dict(zip(self.optimizer.names, updates, strict=True))
        trained = _sides(self.loader).inventory.trained
        counts = [int(own.get(name, 0)) for name, _ in trained]
        return state | {STEPS: torch.tensor(self.loader.peers.all_reduce_max(counts)).float()}

    def _own_steps(self, steps: Tensor) -> Tensor:
        loader = _sides(self.loader)
        own = [side is loader.side for _, side in loader.inventory.trained]
        return steps[torch.tensor(own, dtype=torch.bool, device=steps.device)]

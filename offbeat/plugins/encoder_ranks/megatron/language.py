"""Side of a language rank: megatron-core's decoder with features from an encoder rank.

Also chooses the trainer of each rank if the vision tower has separate ranks next to megatron-core.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# megatron-core has no types. torch declares some functions without types.

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from offbeat.config.sections.trainer_base import ModelTrainerConfig
from offbeat.messages.media import Media
from offbeat.models.media_passes import Features
from offbeat.models.media_rules import MediaRules
from offbeat.plugins.encoder_ranks.bridge import Exchange, prove_sides
from offbeat.plugins.encoder_ranks.lane import LanePasses
from offbeat.plugins.encoder_ranks.layout import side_grid
from offbeat.plugins.encoder_ranks.loading import side_mesh
from offbeat.plugins.encoder_ranks.megatron.encoder import (
    MegatronEncoderTrainer,
    architecture_with_tower,
)
from offbeat.plugins.encoder_ranks.tower_proof import NOT_APART
from offbeat.plugins.megatron.architecture import Architecture
from offbeat.plugins.megatron.freezing import FrozenWeights
from offbeat.plugins.megatron.groups import embedding_ranks_group
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.megatron_trainer import BackendParts, MegatronTrainer, ModelSide
from offbeat.plugins.megatron.passes import MegatronPasses
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.plugins.megatron.tower import FeatureSource
from offbeat.trainers.model_trainer import ModelTrainer
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.sides import Side

_FLOAT: Final = msgspec.msgpack.Decoder(float)


class StageLane(LanePasses):
    """Passes of a language rank. Each rank of the first stage has a part of the gradient."""

    def _send_back(self, gradient: Tensor, named: Sequence[Sequence[str]]) -> None:
        self._sum_over_lane(gradient)
        super()._send_back(gradient, named)

    def _sum_over_lane(self, gradient: Tensor) -> None:
        """Add up the parts of a lane's ranks: gradients of each rank's tokens, or equal shares."""
        dist.all_reduce(gradient, group=embedding_ranks_group())


class LanguageSide(ModelSide):
    """Language model of a rank. The ranks of a replica form one lane.

    The ranks of the first stage read features. One of them receives the features and sends them to
    the others. Each rank adds its part of the gradients to the sum that is sent back.
    """

    lane: type[LanePasses] = StageLane

    def __init__(
        self, trainer: MegatronTrainerConfig, peers: Peers, next_step: Callable[[], int]
    ) -> None:
        super().__init__(trainer, peers, next_step)
        self._exchange = Exchange(trainer, peers, next_step)
        self._passes: LanePasses | None = None  # until passes are wrapped

    def read_architecture(self, model_path: Path) -> Architecture:
        return replace(architecture_with_tower(model_path), tower=())

    def start_groups(self, frozen: FrozenWeights) -> ParallelLayout:
        # Encoder ranks need it, and every rank of the world must join its creation.
        side_mesh(self.trainer.device, self._exchange.grid, self.peers.timeout_s)
        self._trains_tower = not frozen.is_whole_tower
        layout = super().start_groups(frozen)
        self._lane_group = embedding_ranks_group() if layout.is_first_stage else None
        return layout

    def meet(self, architecture: Architecture) -> None:
        if self._exchange.grid.encoder_tensor > 1:
            prove_sides(self.peers, architecture.name, lambda: NOT_APART)

    def find_features(
        self, model: GPTModel, layout: ParallelLayout, rules: MediaRules
    ) -> FeatureSource | None:
        del model, rules
        return self._read_features if layout.is_first_stage else None

    def _read_features(self, media: tuple[Media, ...]) -> Features:
        assert self._passes is not None  # noqa: S101 -- only these passes call it
        return self._passes.read_features(media)

    def whole_norm(self, norm: float, denominator: float) -> float:
        """Return the norm over both sides, by the formula of the tower's optimizer."""
        summed = norm * denominator
        mine = summed * summed if self.peers.rank == 0 else 0.0
        return math.sqrt(sum(self.peers.all_gather(mine, _FLOAT))) / denominator

    def wrap(self, passes: MegatronPasses) -> LanePasses:
        self._passes = self.lane(
            passes, self._exchange, self._lane_group, trained=self._trains_tower
        )
        return self._passes


def grid_trainer_kind(trainer: ModelTrainerConfig, rank: int) -> Callable[..., ModelTrainer]:
    """Return the constructor of a rank's trainer. Language ranks come first."""
    if side_grid(trainer).find_side(rank) is Side.TOWER:
        return MegatronEncoderTrainer
    return partial(MegatronTrainer, parts=BackendParts(side=LanguageSide))

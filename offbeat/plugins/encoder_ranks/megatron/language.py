"""Trainer of a language rank: megatron-core's decoder, whose features come from an encoder rank."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# megatron-core has no types; torch declares some functions without.

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from offbeat.messages.media import Media
from offbeat.models.media_passes import Features
from offbeat.plugins.encoder_ranks.exchange import prove_sides
from offbeat.plugins.encoder_ranks.lane import LaneTrainer
from offbeat.plugins.encoder_ranks.megatron.encoder import architecture_with_tower
from offbeat.plugins.encoder_ranks.tower_proof import NOT_APART
from offbeat.plugins.encoder_ranks.weights import side_mesh
from offbeat.plugins.megatron.architecture import Architecture
from offbeat.plugins.megatron.groups import embedding_ranks_group
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.mapping import TensorBox
from offbeat.plugins.megatron.split_step import MegatronTrainer
from offbeat.plugins.megatron.tower import FeatureSource

_FLOAT: Final = msgspec.msgpack.Decoder(float)


class MegatronLanguageTrainer(LaneTrainer, MegatronTrainer):
    """Trainer of one rank of the language model; the ranks of a replica are one lane.

    Those of its first stage read features. One of them receives them, the others get them from it, and
    each adds its part of their gradients to those that are sent back.
    """

    # --- how it is put together --------------------------------------------------------------------

    def _read_architecture(self) -> Architecture:
        return replace(architecture_with_tower(self.model_path), tower=())

    def _start_groups(self) -> ParallelLayout:
        self._join_grid(self._config)
        # Encoder ranks need it, and every rank of the world takes part in making it.
        side_mesh(self._config.device, self._grid, self.peers.timeout_s)
        self._use(None)
        self._trains_tower = not self.frozen.is_whole_tower
        layout = super()._start_groups()
        self._lane_group = embedding_ranks_group() if layout.is_first_stage else None
        return layout

    def _meet(self, boxes: Sequence[TensorBox]) -> None:
        super()._meet(boxes)
        if self._grid.encoder_tensor > 1:
            prove_sides(self.peers, self.architecture.name, lambda: NOT_APART)

    def _features_by(self, model: GPTModel) -> FeatureSource | None:
        del model
        return self._received_features if self.layout.is_first_stage else None

    def _whole_norm(self, norm: float, denominator: float) -> float:
        """Return the norm over both sides, by the formula of the tower's optimizer."""
        summed = norm * denominator
        mine = summed * summed if self.is_first else 0.0
        return math.sqrt(sum(self.peers.all_gather(mine, _FLOAT))) / denominator

    # --- features ----------------------------------------------------------------------------------

    def _received_features(self, media: tuple[Media, ...]) -> Features:
        assert self._received is not None  # noqa: S101 -- named before the pass
        return self._received.of(media)

    def _send_back(self, gradient: Tensor, named: Sequence[Sequence[str]]) -> None:
        self._sum_over_lane(gradient)
        super()._send_back(gradient, named)

    def _sum_over_lane(self, gradient: Tensor) -> None:
        """Add up the parts of the ranks of a lane: those of their own tokens, or equal shares."""
        dist.all_reduce(gradient, group=embedding_ranks_group())

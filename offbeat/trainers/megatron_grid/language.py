"""Trainer of a language rank: megatron-core's decoder, whose features come from an encoder rank."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# megatron-core has no types; torch declares some functions without.

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray
from torch import Tensor

from offbeat.config.sections.trainer import MegatronTrainerConfig
from offbeat.messages.media import Media
from offbeat.multimodal.canaries import canary_media
from offbeat.multimodal.passes import Features
from offbeat.multimodal.rules import MediaRules
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.grid.bridge import shared_values
from offbeat.trainers.grid.lane import LaneTrainer
from offbeat.trainers.grid.layout import Side
from offbeat.trainers.grid.provenance import media_read
from offbeat.trainers.grid.tower_proof import NOT_APART
from offbeat.trainers.grid.weights import side_mesh
from offbeat.trainers.megatron.architecture import Architecture
from offbeat.trainers.megatron.boxed_trainer import BoxedTrainer
from offbeat.trainers.megatron.groups import embedding_ranks_group
from offbeat.trainers.megatron.layout import ParallelLayout
from offbeat.trainers.megatron.mapping import TensorBox
from offbeat.trainers.megatron.split_step import MegatronTrainer
from offbeat.trainers.megatron.tower import FeatureSource
from offbeat.trainers.megatron_grid.encoder import MegatronEncoderTrainer
from offbeat.trainers.megatron_grid.layout import side_grid
from offbeat.trainers.megatron_grid.sides import architecture_with_tower
from offbeat.trainers.ranks.assembly import trainer_of
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.transfer_queue.schema import POLICY_LOGPROBS

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
        grid = side_grid(self._config)
        # Encoder ranks need it, and every rank of the world takes part in making it.
        side_mesh(self._config.device, grid, self.peers.timeout_s)
        self._join_grid(grid, self.peers.rank, torch.device(self._config.device))
        self._use(None)
        return super()._start_groups()

    def _meet(self, boxes: Sequence[TensorBox]) -> None:
        super()._meet(boxes)
        if self._grid.encoder_tensor > 1:
            self._prove_cut_sides(self.architecture.name, lambda: NOT_APART)

    def _features_by(self, model: GPTModel) -> FeatureSource | None:
        del model
        return self._received_features if self.layout.is_first_stage else None

    @property
    def _rules(self) -> MediaRules:
        return self.architecture.media_rules

    @property
    def _trains_tower(self) -> bool:
        return not self.frozen.is_whole_tower

    # --- passes ------------------------------------------------------------------------------------

    def top_logprobs(
        self, prompts: Sequence[Sequence[int]], count: int, *, quantized: bool = False
    ) -> TopLogprobs:
        asked = canary_media(self._rules, prompts)
        rounded = self._quantized_matrices() if quantized else nullcontext()
        # All ranks gather what they round before lanes exchange a message
        with rounded, self._exchanged([each for each in asked if each is not None], trained=False):
            return super().top_logprobs(prompts, count)

    def _logprobs(
        self, name: str, count: int, microbatches: Sequence[PackedRows], temperature: float
    ) -> NDArray[np.float32]:
        if name != POLICY_LOGPROBS:
            _ = self._reference  # loaded before the exchange, on all ranks
        with self._exchanged(media_read(microbatches), trained=False):
            return super()._logprobs(name, count, microbatches, temperature)

    def _whole_norm(self, norm: float, denominator: float) -> float:
        """Return the norm over both sides, by the formula of the tower's optimizer."""
        summed = norm * denominator
        mine = summed * summed if self.is_first else 0.0
        return math.sqrt(sum(self.peers.all_gather(mine, _FLOAT))) / denominator

    # --- features ----------------------------------------------------------------------------------

    def _received_features(self, media: tuple[Media, ...]) -> Features:
        assert self._received is not None  # noqa: S101 -- named before the pass
        return self._received.of(media)

    def _shared(self, counts: dict[str, int], values: Tensor | None) -> Tensor | None:
        if not counts or not self.layout.is_first_stage:
            return None
        receiver = self._grid.receiver_of(self._grid.lane_of(self.peers.rank))
        return shared_values(values, receiver, embedding_ranks_group(), self._device)

    def _send_back(self, gradient: Tensor, named: Sequence[Sequence[str]]) -> None:
        self._sum_over_lane(gradient)
        super()._send_back(gradient, named)

    def _sum_over_lane(self, gradient: Tensor) -> None:
        """Add up the parts of the ranks of a lane: those of their own tokens, or equal shares."""
        dist.all_reduce(gradient, group=embedding_ranks_group())


def megatron_trainer_of(
    spec: TrainerSpec, config: MegatronTrainerConfig, peers: Peers
) -> BoxedTrainer:
    """Build the trainer of one rank: that of one side with ``trainer.encoder``."""
    if config.encoder is None:
        return trainer_of(MegatronTrainer, spec, config, peers)
    if side_grid(config).side_of(peers.rank) is Side.LANGUAGE:
        return trainer_of(MegatronLanguageTrainer, spec, config, peers)
    return trainer_of(MegatronEncoderTrainer, spec, config, peers)

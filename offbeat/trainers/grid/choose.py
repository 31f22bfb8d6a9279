"""Chooses the trainer of a rank if the vision tower has its own ranks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.config.limits import encoder_tokens
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.multimodal.canaries import canary_media
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.grid.bridge import shared_values
from offbeat.trainers.grid.encoding import EncodingTrainer
from offbeat.trainers.grid.lane import LaneFeatures, LaneTrainer
from offbeat.trainers.grid.layout import Side, torch_grid
from offbeat.trainers.grid.provenance import media_read
from offbeat.trainers.grid.sides import no_features
from offbeat.trainers.grid.trainer import GridTrainer
from offbeat.trainers.torch.split_step import TorchTrainer


class EncoderTrainer(EncodingTrainer, GridTrainer):
    """Trainer of one rank of the vision tower, cut as the language model is on the other ranks."""

    def _tower_of(self, name: str) -> PreTrainedModel:
        return self._model_of(name)

    @property
    def _max_tokens(self) -> int | None:
        return encoder_tokens(self._config)


class LanguageTrainer(LaneTrainer, GridTrainer):
    """Trainer of one rank of the language model; the ranks of a replica are one lane.

    Ranks that share its matrices read the same features, which one of them receives, and each has the
    whole gradient of them.
    """

    def top_logprobs(
        self, prompts: Sequence[Sequence[int]], count: int, *, quantized: bool = False
    ) -> TopLogprobs:
        asked = canary_media(self._rules, prompts)
        with self._exchanged([each for each in asked if each is not None], trained=False):
            return super().top_logprobs(prompts, count, quantized=quantized)

    def _logprobs(
        self, name: str, count: int, microbatches: Sequence[PackedRows], temperature: float
    ) -> NDArray[np.float32]:
        self._model_of(name)  # loaded before the exchange, on all ranks
        with self._exchanged(media_read(microbatches), trained=False):
            return super()._logprobs(name, count, microbatches, temperature)

    def _shared(self, counts: dict[str, int], values: Tensor | None) -> Tensor | None:
        if not counts or self._mesh.tensor is None:
            return values
        receiver = self._grid.receiver_of(self._grid.lane_of(self.peers.rank))
        return shared_values(values, receiver, self._mesh.tensor.get_group(), self._device)

    def _use(self, received: LaneFeatures | None) -> None:
        super()._use(received)
        self._features_of = no_features
        if received is not None:
            self._features_of = lambda _, media: received.of(media)


def grid_trainer_kind(trainer: TorchTrainerConfig, rank: int) -> type[TorchTrainer]:
    """Return the class of the trainer of a rank: language ranks come first."""
    side = torch_grid(trainer).side_of(rank)
    return LanguageTrainer if side is Side.LANGUAGE else EncoderTrainer

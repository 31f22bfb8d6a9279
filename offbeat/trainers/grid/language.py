"""Trainer of a language rank of the torch trainer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offbeat.multimodal.canaries import canary_media
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.grid.bridge import shared_values
from offbeat.trainers.grid.lane import LaneFeatures, LaneTrainer
from offbeat.trainers.grid.provenance import media_read
from offbeat.trainers.grid.sides import no_features
from offbeat.trainers.grid.trainer import GridTrainer


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

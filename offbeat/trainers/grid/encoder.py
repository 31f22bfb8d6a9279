"""Trainer of an encoder rank beside ranks of the torch trainer."""

from transformers import PreTrainedModel

from offbeat.config.limits import encoder_tokens
from offbeat.trainers.grid.encoding import EncodingTrainer
from offbeat.trainers.grid.trainer import GridTrainer


class EncoderTrainer(EncodingTrainer, GridTrainer):
    """Trainer of one rank of the vision tower, cut as the language model is on the other ranks."""

    def _tower_of(self, name: str) -> PreTrainedModel:
        return self._model_of(name)

    @property
    def _max_tokens(self) -> int | None:
        return encoder_tokens(self._config)

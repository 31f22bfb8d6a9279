"""Chooses the trainer of a rank if the vision tower has its own ranks."""

from offbeat.config.sections.trainer_base import ModelTrainerConfig
from offbeat.plugins.encoder_ranks.encoding import EncodingTrainer
from offbeat.plugins.encoder_ranks.lane import LaneFeatures, LaneTrainer
from offbeat.plugins.encoder_ranks.layout import side_grid
from offbeat.plugins.encoder_ranks.sides import no_features
from offbeat.plugins.encoder_ranks.trainer import GridTrainer
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.split_step import TorchTrainer


class EncoderTrainer(EncodingTrainer, GridTrainer):
    """Trainer of one rank of the vision tower, cut as the language model is on the other ranks."""


class LanguageTrainer(LaneTrainer, GridTrainer):
    """Trainer of one rank of the language model; the ranks of a replica are one lane.

    Ranks that share its matrices read the same features, which one of them receives, and each has the
    whole gradient of them.
    """

    def _use(self, received: LaneFeatures | None) -> None:
        super()._use(received)
        self._features_of = no_features
        if received is not None:
            self._features_of = lambda _, media: received.of(media)


def grid_trainer_kind(trainer: ModelTrainerConfig, rank: int) -> type[TorchTrainer]:
    """Return the class of the trainer of a rank: language ranks come first."""
    side = side_grid(trainer).side_of(rank)
    return LanguageTrainer if side is Side.LANGUAGE else EncoderTrainer

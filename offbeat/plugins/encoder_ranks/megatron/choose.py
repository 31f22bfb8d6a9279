"""Chooses the trainer of a rank if the vision tower has its own ranks, next to megatron-core."""

from offbeat.config.sections.trainer_base import ModelTrainerConfig
from offbeat.plugins.encoder_ranks.layout import side_grid
from offbeat.plugins.encoder_ranks.megatron.encoder import MegatronEncoderTrainer
from offbeat.plugins.encoder_ranks.megatron.language import MegatronLanguageTrainer
from offbeat.plugins.megatron.boxed_trainer import BoxedTrainer
from offbeat.trainers.sides import Side


def grid_trainer_kind(trainer: ModelTrainerConfig, rank: int) -> type[BoxedTrainer]:
    """Return the class of the trainer of a rank: language ranks come first."""
    side = side_grid(trainer).side_of(rank)
    return MegatronLanguageTrainer if side is Side.LANGUAGE else MegatronEncoderTrainer

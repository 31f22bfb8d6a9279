"""Chooses the trainer of a rank if the vision tower has its own ranks, next to megatron-core."""

from collections.abc import Callable
from functools import partial

from offbeat.config.sections.trainer_base import ModelTrainerConfig
from offbeat.plugins.encoder_ranks.layout import side_grid
from offbeat.plugins.encoder_ranks.megatron.encoder import MegatronEncoderTrainer
from offbeat.plugins.encoder_ranks.megatron.language import LanguageSide
from offbeat.plugins.megatron.split_step import BackendParts, MegatronTrainer
from offbeat.trainers.model_trainer import ModelTrainer
from offbeat.trainers.sides import Side


def grid_trainer_kind(trainer: ModelTrainerConfig, rank: int) -> Callable[..., ModelTrainer]:
    """Return what makes the trainer of a rank: language ranks come first."""
    if side_grid(trainer).side_of(rank) is Side.TOWER:
        return MegatronEncoderTrainer
    return partial(MegatronTrainer, parts=BackendParts(side=LanguageSide))

"""Choice of a rank's trainer where the vision tower has ranks of its own."""

from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.grid.encoder import EncoderTrainer
from offbeat.trainers.grid.language import LanguageTrainer
from offbeat.trainers.grid.layout import Side, torch_grid
from offbeat.trainers.torch.split_step import TorchTrainer


def grid_trainer_kind(trainer: TorchTrainerConfig, rank: int) -> type[TorchTrainer]:
    """Return the class of the trainer of a rank: language ranks come first."""
    side = torch_grid(trainer).side_of(rank)
    return LanguageTrainer if side is Side.LANGUAGE else EncoderTrainer

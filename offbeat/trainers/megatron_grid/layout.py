"""Language ranks and encoder ranks of a recipe of the megatron trainer. Pure."""

from offbeat.config.limits import encoder_ranks
from offbeat.config.sections.trainer import MegatronTrainerConfig
from offbeat.trainers.grid.layout import Grid


def side_grid(trainer: MegatronTrainerConfig) -> Grid:
    """Return the ranks of both sides: a lane is a data-parallel replica of the language model."""
    return Grid(
        lanes=trainer.data_parallel,
        encoders=encoder_ranks(trainer),
        embedding_ranks=trainer.tensor_parallel * trainer.context_parallel,
        stages=trainer.pipeline_parallel,
    )

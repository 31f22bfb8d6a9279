"""Language ranks and encoder ranks of a recipe of the megatron trainer. Pure."""

from offbeat.config.sections.trainer import MegatronTrainerConfig
from offbeat.trainers.grid.layout import Grid


def side_grid(trainer: MegatronTrainerConfig) -> Grid:
    """Return the ranks of both sides: a lane is a data-parallel replica of the language model."""
    encoder = trainer.encoder
    assert encoder is not None  # noqa: S101 -- without one no rank holds a side alone
    return Grid(
        lanes=trainer.data_parallel,
        encoders=encoder.data_parallel,
        encoder_tensor=encoder.tensor_parallel,
        embedding_ranks=trainer.tensor_parallel * trainer.context_parallel,
        stages=trainer.pipeline_parallel,
    )

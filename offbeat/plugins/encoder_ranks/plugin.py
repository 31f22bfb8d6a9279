"""Separate ranks for the vision tower, next to any backend of the trainer: ``trainer.encoder``."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from offbeat.config.base import Config, of_kind
from offbeat.config.problems import Clash
from offbeat.messages.finding import Finding
from offbeat.trainers.trainer_plugin import TrainerPart

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig
    from offbeat.trainers.torch.torch_trainer import TorchParts


class EncoderConfig(Config):
    """Ranks that hold only the vision tower and its projector. Others hold the language model."""

    data_parallel: Annotated[int, Field(ge=1)] = 1
    """Encoder ranks, in addition to the language ranks. `trainer.data_parallel` must be a multiple
    of this. Each encoder rank encodes the pictures for an equal share of the language ranks."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks per encoder. They share the matrices of the tower's layers (docs/encoder-ranks.md)."""

    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] | None = None
    """Maximum picture tokens that the tower computes at once. null: a whole chunk. This bounds
    memory without changing the gradient, but the backward pass recomputes every microbatch except
    the last. Pictures are never split."""

    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads per encoder rank."""

    cpus: Annotated[float, Field(ge=0)] | None = None
    """CPUs that Ray reserves per encoder rank. null: `trainer.cpus`."""

    gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs that Ray reserves per encoder rank. null: `trainer.gpus`. Use a whole number, because
    NCCL refuses two ranks on one GPU."""


class EncoderRanks(TrainerPart):
    """Trains the vision tower on different ranks from the language model."""

    key = "encoder"
    section = EncoderConfig
    doc = "Separate ranks for the vision tower (docs/encoder-ranks.md)."

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that cannot work if the vision tower has separate ranks."""
        from offbeat.plugins.encoder_ranks.clashes import encoder_clashes

        yield from encoder_clashes(config)

    def find_clashes_of_real_runs(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield a clash if the encoder ranks' GPUs contradict the language ranks' device."""
        from offbeat.plugins.encoder_ranks.clashes import encoder_device_clashes

        yield from encoder_device_clashes(config)

    def check(self, config: "RunConfig", gpu: int | None) -> Iterator[Finding]:
        """Check that the model has two sides, and that each side fits its ranks."""
        from offbeat.plugins.encoder_ranks.checks import check_encoder

        yield from check_encoder(config, gpu)

    def replace_parts(self, config: "RunConfig", rank: int, parts: "TorchParts") -> "TorchParts":
        """Load one side of the model on each rank, and exchange features with the other side."""
        from offbeat.plugins.encoder_ranks.loading import GridLoader
        from offbeat.plugins.encoder_ranks.torch_parts import GridState, wrap_passes

        del config, rank
        return replace(parts, loader=GridLoader, state=GridState, passes=wrap_passes)

    def choose_trainer(self, config: "RunConfig", rank: int) -> Callable[..., Any] | None:
        """Return the constructor of a rank's megatron trainer. Language ranks come first."""
        from offbeat.config.sections.trainer_base import ModelTrainerConfig

        if config.trainer.backend == "torch":
            return None
        from offbeat.plugins.encoder_ranks.megatron.language import grid_trainer_kind

        return grid_trainer_kind(of_kind(ModelTrainerConfig, config.trainer), rank)


PART: Final = EncoderRanks()

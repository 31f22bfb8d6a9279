"""Defines section ``trainer`` of a recipe with ``trainer.backend=megatron``."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.problems import Clash
from offbeat.config.sections.trainer_base import ModelTrainerConfig


class MegatronTrainerConfig(ModelTrainerConfig):
    """megatron-core (extra ``megatron``): only mapped model families (docs/megatron.md)."""

    backend: Literal["megatron"] = "megatron"
    """Training backend."""

    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Stages that share the layers. Stages idle at the start and end of a step, so send several
    microbatches per stage."""

    layers_per_stage: (
        Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] | None
    ) = None
    """Layers of each pipeline stage, as in `[11, 12, 12, 11]`. null: equal numbers. The first stage
    also has the embedding, and the last one has the head."""

    context_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each row of tokens. Together they hold up to
    `trainer.max_tokens_per_microbatch` times this number of tokens."""

    expert_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks of a stage that share the experts. It must divide tensor_parallel x context_parallel x
    data_parallel / expert_tensor_parallel."""

    expert_tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that share the matrices of each expert, independent of `trainer.tensor_parallel`."""

    sequence_parallel: bool = False
    """Let tensor-parallel ranks also share the tokens. This saves activation memory without more
    traffic. Models with experts need it for tensor parallelism."""

    @property
    def stages(self) -> int:
        """Return the number of ranks that share the layers."""
        return self.pipeline_parallel

    @property
    def ranks_of_row(self) -> int:
        """Return the number of ranks that share each row of tokens."""
        return self.context_parallel

    @property
    def ranks_of_expert(self) -> int:
        """Return the number of ranks that share the matrices of each expert."""
        return self.expert_tensor_parallel


def layout_clashes(trainer: MegatronTrainerConfig) -> Iterator[Clash]:
    """Yield parallel sizes that cannot work together."""
    yield from _tensor_parallel_ranks_share_the_tokens(trainer)
    yield from _experts_fill_the_ranks_of_a_stage(trainer)
    yield from _every_stage_has_its_layers(trainer)


def _tensor_parallel_ranks_share_the_tokens(trainer: MegatronTrainerConfig) -> Iterator[Clash]:
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        yield Clash(
            ("trainer.sequence_parallel", "trainer.tensor_parallel"),
            "trainer.sequence_parallel does nothing with trainer.tensor_parallel=1: it is "
            "tensor-parallel ranks that share the tokens",
            "Set it to false, or trainer.tensor_parallel to 2 or more.",
        )


def _experts_fill_the_ranks_of_a_stage(trainer: MegatronTrainerConfig) -> Iterator[Clash]:
    tensor, context, data = (
        trainer.tensor_parallel,
        trainer.context_parallel,
        trainer.data_parallel,
    )
    expert, within = trainer.expert_parallel, trainer.expert_tensor_parallel
    if tensor * context * data % (expert * within):
        yield Clash(
            ("trainer.expert_parallel", "trainer.expert_tensor_parallel"),
            f"trainer.expert_parallel={expert} x trainer.expert_tensor_parallel={within} does not divide the "
            f"{tensor * context * data} ranks of a pipeline stage: tensor_parallel={tensor} x "
            f"context_parallel={context} x data_parallel={data}",
            f"Set their product to a divisor of {tensor * context * data}, or trainer.data_parallel to a number "
            "with which it is one.",
        )


def _every_stage_has_its_layers(trainer: MegatronTrainerConfig) -> Iterator[Clash]:
    stages = trainer.layers_per_stage
    if stages is not None and len(stages) != trainer.pipeline_parallel:
        yield Clash(
            ("trainer.layers_per_stage", "trainer.pipeline_parallel"),
            f"trainer.layers_per_stage has {len(stages)} numbers for trainer.pipeline_parallel="
            f"{trainer.pipeline_parallel} stages",
            f"Give one number for each stage, or set trainer.pipeline_parallel to {len(stages)}.",
        )

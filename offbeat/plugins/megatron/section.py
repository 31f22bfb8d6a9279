"""Defines section ``trainer`` of a recipe with ``trainer.backend=megatron``."""

from typing import Annotated, Literal

from pydantic import Field

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
    """Ranks that share each row of tokens. Together they hold this many times
    `trainer.max_tokens_per_microbatch`."""

    expert_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks of a stage that share the experts. It must divide tensor_parallel x context_parallel x
    data_parallel / expert_tensor_parallel."""

    expert_tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that share the matrices of each expert, independent of `trainer.tensor_parallel`."""

    sequence_parallel: bool = False
    """Let tensor-parallel ranks also share the tokens: less activation memory, same traffic.
    Experts with tensor parallelism need it."""

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

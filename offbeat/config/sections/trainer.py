"""Defines section ``trainer`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config
from offbeat.config.sections.optimizer import OptimizerConfig


class TrainerConfig(Config):
    """Trainer ranks, and how a step is divided among and within them."""

    backend: Literal["torch", "megatron", "stub"] = "torch"
    """torch: any Hugging Face causal LM; megatron: extra ``megatron``; stub: a cost model."""

    device: str = "cpu"
    """torch device of each rank."""

    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of each rank."""

    data_parallel: Annotated[int, Field(ge=1)] = 1
    """Data-parallel ranks."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Tensor-parallel ranks."""

    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Pipeline stages."""

    expert_parallel: Annotated[int, Field(ge=1)] = 1
    """Expert-parallel ranks."""

    sequence_parallel: bool = False
    """megatron: tensor-parallel ranks share the tokens between their matrices, too.

    Experts with tensor
    parallelism need it."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] = 8192
    """Tokens, padding included, in one forward-backward on one rank."""

    shared_prompt: bool = True
    """Pack the samples of a group behind one copy of their prompt, if that is proved exact for the model
    (docs/model-proofs.md); off, or if it is not: one padded row for each sample."""

    activation_checkpointing: bool = False
    """Keep only the input of each decoder layer for backward, and compute the layer again there.

    Much
    less memory for up to a third more work, and the same gradient to the last bit."""

    min_tokens_per_chunk: Annotated[int, Field(ge=1)] | None = None
    """Tokens to wait for before a chunk is sent, unless the step ends. None.

    Fills every rank once.
    """

    start_deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time the trainer gets to start."""

    step_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest healthy call of a train step."""

    step_retries: Annotated[int, Field(ge=0)] = 1
    """Times a step is aborted and tried again after a rank reported a failure."""

    restart_budget: Annotated[int, Field(ge=0)] = 3
    """Times the ranks are replaced and restored from a checkpoint, over the run.

    One more ends it.
    """

    max_steps_not_applied: Annotated[int, Field(ge=1)] = 3
    """Steps in a row that end the run if none was applied.

    Loss or gradient not finite, or nothing to train on.
    """

    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs Ray reserves for each rank."""

    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs Ray reserves for each rank."""

"""Defines section ``trainer.encoder`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class EncoderConfig(Config):
    """Ranks that hold the vision tower and its projector, and nothing else; the others hold the language model."""

    data_parallel: Annotated[int, Field(ge=1)] = 1
    """Encoder ranks, in addition to `trainer.data_parallel`, which must be a multiple of this. Each
    encodes the pictures of an equal share of the language ranks."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks per encoder. They share the matrices of the tower's layers (docs/encoder-ranks.md)."""

    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] | None = None
    """Maximum picture tokens that the tower computes at once. null: a whole chunk. It bounds memory
    and does not change the gradient, but all except the last microbatch are recomputed in the
    backward pass. Pictures are never split."""

    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads per encoder rank."""

    cpus: Annotated[float, Field(ge=0)] | None = None
    """CPUs that Ray reserves per encoder rank. null: `trainer.cpus`."""

    gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs that Ray reserves per encoder rank. null: `trainer.gpus`. Use a whole number, because
    NCCL refuses two ranks on one GPU."""

"""Defines section ``trainer.encoder`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class EncoderConfig(Config):
    """Ranks that hold the vision tower and its projector, and nothing else; the others hold the language model."""

    data_parallel: Annotated[int, Field(ge=1)] = 1
    """Encoder ranks, beside those of `trainer.data_parallel`, of which it has to be a divisor: each encodes the
    pictures of as many of those ranks. More make encoding shorter and cut the tower over them."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that each of `data_parallel` becomes: they encode the same pictures, and divide the matrices of the
    tower's layers among themselves (docs/encoder-ranks.md)."""

    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] | None = None
    """Tokens of pictures that the tower computes at once; null: those of a whole chunk. It bounds the memory of a
    pass, and changes no gradient. A picture is never cut: one of more tokens is computed alone. Of several microbatches
    all but the last are computed a second time, in the backward pass."""

    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of each encoder rank; those of `trainer.threads` are of the language ranks alone."""

    cpus: Annotated[float, Field(ge=0)] | None = None
    """CPUs Ray reserves for each encoder rank; null: as many as `trainer.cpus`."""

    gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs Ray reserves for each encoder rank; null: as many as `trainer.gpus`. Set it to a whole number, 1 as a
    rule: NCCL refuses two ranks on one GPU."""

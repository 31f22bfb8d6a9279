"""Defines section ``generator.sampling`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config
from offbeat.messages.generation import LEAST_TEMPERATURE


class SamplingConfig(Config):
    """Settings by which tokens are drawn."""

    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE)] = 1.0
    """Logits are divided by it before the softmax; the loss uses the same temperature. Higher
    explores more and answers worse, lower repeats itself until groups have nothing to
    compare."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass to draw from; logprobs are of the untruncated distribution. Below 1 cuts off
    unlikely tokens, but the samples are then not drawn from the policy that the loss
    assumes."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens a model call may generate. More let long answers finish and cost time, memory in
    the buffer and longer steps; what runs out counts as truncated."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample, besides the model's end-of-sequence token. Add those that end a
    turn of a chat model; without them
    such samples run on to ``max_new_tokens``."""

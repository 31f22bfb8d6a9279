"""Defines section ``generator.sampling`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config
from offbeat.messages.generation import LEAST_TEMPERATURE


class SamplingConfig(Config):
    """Settings by which tokens are drawn."""

    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE)] = 1.0
    """Logits are divided by it; the loss uses the same value."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass to draw from; logprobs are of the full distribution. Below 1 the samples differ
    from the policy that the loss assumes."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens that one model call may generate. Longer responses are truncated."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample, besides the model's end token. Add the end-of-turn tokens of chat
    models."""

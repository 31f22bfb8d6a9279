"""Defines section ``generator.sampling`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class SamplingConfig(Config):
    """Settings by which tokens are drawn."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by it before the softmax; the loss uses the same temperature."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass to draw from. Logprobs are of the untruncated distribution."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens a model call may generate."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample, besides the model's end-of-sequence token."""

"""Defines section ``generator.sampling`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config, InWords, OneIsAList
from offbeat.messages.generation import LEAST_TEMPERATURE


class SamplingConfig(Config):
    """Settings by which tokens are drawn."""

    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE)] = 1.0
    """Logits are divided by it; the loss uses the same value."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass to draw from; logprobs are of the full distribution. Below 1 the samples differ
    from the policy that the loss assumes."""

    top_k: Annotated[int, Field(ge=0)] = 0
    """Most probable tokens to draw from, with ties of the last one; 0 is all tokens. Logprobs are
    of the full distribution. Above 0 the samples differ from the policy that the loss assumes."""

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least probability of a token to draw, as a fraction of the most probable token's. Logprobs
    are of the full distribution. Above 0 the samples differ from the policy that the loss assumes.
    Applied before `top_k`, and both before `top_p`."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens that one model call may generate. Longer responses are truncated."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample, besides the model's end token. Add the end-of-turn tokens of chat
    models."""

    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1), InWords("not empty")], ...], OneIsAList()
    ] = ()
    """Strings that end a sample, once its text contains one. A single string is a list of one. All
    tokens are kept and trained, up to the one that completes the string, and a reward sees the
    string in the text."""

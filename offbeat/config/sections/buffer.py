"""Defines section ``buffer`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class BufferConfig(Config):
    """Limits of outstanding groups. Rollouts wait for room; nothing is dropped."""

    capacity_groups: Annotated[int, Field(ge=1)] | None = None
    """Prompt groups admitted and not yet trained; None: what the sampler can use. Fewer bound
    memory and idle the generators when the buffer is full."""

    capacity_mib: Annotated[float, Field(gt=0)] = 1024.0
    """Payload held and promised, in MiB; a group in flight counts at its largest possible size.
    More let more groups be in flight and take shared memory, whose overflow Ray spills to
    disk."""

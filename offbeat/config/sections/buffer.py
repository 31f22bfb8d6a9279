"""Defines section ``buffer`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class BufferConfig(Config):
    """Limits of outstanding groups. Rollouts wait for room; nothing is dropped."""

    capacity_groups: Annotated[int, Field(ge=1)] | None = None
    """Prompt groups admitted and not yet trained. null: what the sampler can use. A full buffer
    idles the engines."""

    capacity_mib: Annotated[float, Field(gt=0)] = 1024.0
    """Payload limit in MiB. A group in flight counts with its largest possible size. Beyond shared
    memory, Ray spills to disk."""

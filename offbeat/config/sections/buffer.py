"""Defines sections ``buffer`` and ``transfer_queue`` of a recipe: limits and storage of groups."""

from typing import Annotated, Literal

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


class TransferQueueConfig(Config):
    """Storage of finished groups that wait to be trained."""

    spool: Literal["ready", "keep", "off"] = "ready"
    """ready: also write finished groups to `RUN/spool`, so that they survive a lost controller; a
    trained group is removed. keep: remove none, for `offbeat retrain`; 13 bytes per response token.
    off: keep them only in memory."""

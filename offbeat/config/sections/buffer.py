"""Defines sections ``buffer`` and ``transfer_queue`` of a recipe: limits and storage of groups."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config


class BufferConfig(Config):
    """Limits on outstanding groups. Rollouts wait for room; nothing is dropped."""

    capacity_groups: Annotated[int, Field(ge=1)] | None = None
    """Maximum prompt groups admitted but not yet trained. null: as many as the sampler can use.
    Engines idle while the buffer is full."""

    capacity_mib: Annotated[float, Field(gt=0)] = 1024.0
    """Maximum payload in MiB. A group in flight counts with its largest possible size. Ray spills
    to disk if shared memory is too small."""


class TransferQueueConfig(Config):
    """Storage of finished groups that wait to be trained."""

    spool: Literal["ready", "keep", "off"] = "ready"
    """ready: also write finished groups to `RUN/spool`, so that they survive a lost controller; a
    trained group is removed. keep: remove none, for `offbeat retrain`; 13 bytes per response token.
    off: keep them only in memory."""

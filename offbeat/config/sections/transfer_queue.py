"""Defines section ``transfer_queue`` of a recipe."""

from typing import Literal

from offbeat.config.base import Config


class TransferQueueConfig(Config):
    """Storage of finished groups that wait to be trained."""

    spool: Literal["ready", "off"] = "ready"
    """ready: also write finished groups to `RUN/spool`, so that they survive a lost controller.
    off: keep them only in memory."""

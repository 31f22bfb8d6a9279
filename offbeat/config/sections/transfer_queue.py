"""Defines section ``transfer_queue`` of a recipe."""

from typing import Literal

from offbeat.config.base import Config


class TransferQueueConfig(Config):
    """Storage of finished groups that wait to be trained."""

    spool: Literal["ready", "off"] = "ready"
    """ready: finished groups are also written to ``RUN/spool``, so that they outlive the
    controller and are not rolled out again after it was lost; off: they live in its memory
    alone, which saves the disk writes."""

"""Defines section ``wandb`` of a recipe."""

from typing import Literal

from offbeat.config.base import Config


class WandbConfig(Config):
    """Weights & Biases, one sink beside ``metrics.jsonl``."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: as the variable `WANDB_MODE` says, else online if an API key is set, else offline.
    offline: on disk until `wandb sync`. disabled: nothing; `metrics.jsonl` always has every metric."""

    project: str = "offbeat"
    """W&B project."""

    entity: str | None = None
    """W&B team or user. null: the default of the API key."""

"""Defines section ``wandb`` of a recipe."""

from typing import Literal

from offbeat.config.base import Config


class WandbConfig(Config):
    """Weights & Biases, one sink beside ``metrics.jsonl``."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online with an API key in the environment, else offline. offline keeps the run on
    disk, for machines without network; disabled writes nothing for it."""

    project: str = "offbeat"
    """Project the run is shown in."""

    entity: str | None = None
    """Team or user; None: the default of the API key."""

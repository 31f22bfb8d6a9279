"""Defines section ``wandb`` of a recipe."""

from typing import Literal

from offbeat.config.base import Config


class WandbConfig(Config):
    """Weights & Biases, one sink beside ``metrics.jsonl``."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online with an API key in the environment, else offline. online shows the run while it goes on and
    needs the network; offline keeps it on disk until ``wandb sync``; disabled writes nothing for it and saves
    wandb's process, and ``metrics.jsonl`` has every metric all the same."""

    project: str = "offbeat"
    """Project the run is shown in. Runs are compared within one: one for many experiments fills with what is not
    comparable, one for each hides what belongs together."""

    entity: str | None = None
    """Team or user; None: the default of the API key. A name sends the run to the same place whoever starts it, if
    their key may write there."""

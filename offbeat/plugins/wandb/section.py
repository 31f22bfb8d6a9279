"""Defines section ``wandb`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config, InWords, OneIsAList

Tag = Annotated[str, Field(min_length=1, max_length=64), InWords("of 1 to 64 characters")]


class WandbConfig(Config):
    """Weights & Biases, in addition to ``metrics.jsonl``."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: the value of the variable `WANDB_MODE`. If it is not set: online if there is an API
    key, else offline. offline: write to disk until `wandb sync`. disabled: nothing. `metrics.jsonl`
    always has every metric."""

    project: str = "offbeat"
    """W&B project."""

    entity: str | None = None
    """W&B team or user. null: the API key's default."""

    group: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Name under which W&B groups runs, such as the seeds of one recipe."""

    tags: Annotated[tuple[Tag, ...], Field(max_length=64), OneIsAList()] = ()
    """Tags of the run. A single tag needs no brackets."""

    notes: Annotated[str, Field(max_length=4000)] | None = None
    """Text on the run's page."""

    samples_interval: Annotated[int, Field(ge=0)] = 50
    """Steps between two tables of samples. Step 1 also has one. 0: no table is sent, so no sample
    text leaves the run directory. Needs `rollout.log`."""

    samples_rows: Annotated[int, Field(ge=1, le=64)] = 16
    """Samples in a table, at most four per prompt. Longer texts are cut to 2,000 characters."""

    histograms: bool = True
    """Write histograms of reward and response length of each step."""

    system_metrics: bool = True
    """Let W&B measure processor, memory, disk and GPUs of the controller's machine."""

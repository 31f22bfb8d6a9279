"""Defines section ``stub`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class StubConfig(Config):
    """The cost model of stub trainer and stub generators."""

    median_rollout_s: Annotated[float, Field(gt=0)] = 0.3
    """Median seconds of a group's rollout."""

    tail_sigma: Annotated[float, Field(ge=0)] = 0.8
    """Sigma of the rollout times' log-normal distribution. 0: all are equal."""

    step_s: Annotated[float, Field(ge=0)] = 0.2
    """Seconds of computation per optimizer step."""

    sync_s: Annotated[float, Field(ge=0)] = 0.02
    """Seconds for an engine to load weights."""

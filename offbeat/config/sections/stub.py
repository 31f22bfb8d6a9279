"""Defines section ``stub`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class StubConfig(Config):
    """The cost model of stub trainer and stub generators."""

    median_rollout_s: Annotated[float, Field(gt=0)] = 0.3
    """Median time of one group."""

    tail_sigma: Annotated[float, Field(ge=0)] = 0.8
    """Sigma of the log-normal around it: long tails."""

    step_s: Annotated[float, Field(ge=0)] = 0.2
    """Compute time of one optimizer step."""

    sync_s: Annotated[float, Field(ge=0)] = 0.02
    """Time an engine takes to load weights."""

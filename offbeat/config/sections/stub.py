"""Defines section ``stub`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class StubConfig(Config):
    """The cost model of stub trainer and stub generators."""

    median_rollout_s: Annotated[float, Field(gt=0)] = 0.3
    """Median time of a group."""

    tail_sigma: Annotated[float, Field(ge=0)] = 0.8
    """Sigma of its log-normal distribution. 0: all take the same time."""

    step_s: Annotated[float, Field(ge=0)] = 0.2
    """Compute time of an optimizer step."""

    sync_s: Annotated[float, Field(ge=0)] = 0.02
    """Time for an engine to load weights."""

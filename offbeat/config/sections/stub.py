"""Defines section ``stub`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class StubConfig(Config):
    """The cost model of stub trainer and stub generators."""

    median_rollout_s: Annotated[float, Field(gt=0)] = 0.3
    """Median time of one group. Longer makes generation the bottleneck of the dry run."""

    tail_sigma: Annotated[float, Field(ge=0)] = 0.8
    """Sigma of the log-normal around it. More makes a few rollouts far longer than the rest,
    which shows how a sampler handles stragglers; 0: all take the same."""

    step_s: Annotated[float, Field(ge=0)] = 0.2
    """Compute time of one optimizer step. Longer makes the trainer the bottleneck of the dry
    run."""

    sync_s: Annotated[float, Field(ge=0)] = 0.02
    """Time an engine takes to load weights. Longer makes weight sync the bottleneck of the dry
    run."""

"""Defines section ``environments`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config
from offbeat.config.sections.data import DataConfig
from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.config.sections.eval import EvalSetConfig


class MixedEnvironmentConfig(Config):
    """One of several environments that a run trains on."""

    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """Prompts of this environment among each run of as many prompts as the weights of all
    environments add up to: 3 and 1 are three of every four. A larger share learns this one faster, and
    the others slower."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """Settings that turn its prompts into rewarded samples, as the section `environment` of a run with one."""

    data: DataConfig = DataConfig()
    """Source of its prompts, as the section `data` of a run with one environment."""

    eval: EvalSetConfig = EvalSetConfig()
    """Evaluation set of this environment, under its name; used with `eval.interval`."""

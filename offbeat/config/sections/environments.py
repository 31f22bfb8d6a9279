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
    """Share of this environment among the prompts: weights 3 and 1 give three of every four."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """Settings of this environment."""

    data: DataConfig = DataConfig()
    """Prompts of this environment."""

    eval: EvalSetConfig = EvalSetConfig()
    """Evaluation set of this environment, under its name. Needs `eval.interval`."""

"""Defines section ``eval`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config, RecipePath


class EvalConfig(Config):
    """Scoring prompts at one weight version: held-out ones with ``path``."""

    interval: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations; 0: none."""

    path: RecipePath | None = None
    """JSON Lines file with held-out prompts; relative to the recipe. None: the first ``prompts`` that
    the run trains on, each once: a score of what was learnt by heart too, not a held-out one."""

    prompts: Annotated[int, Field(ge=1)] = 64
    """Prompts of one evaluation, at most."""

    samples: Annotated[int, Field(ge=1)] = 1
    """Samples of each prompt."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Time one evaluation may hold its engine at the version it scores; then it is given up."""

"""Defines section ``eval`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config, RecipePath


class EvalConfig(Config):
    """Scoring prompts at one weight version: held-out ones with ``path``."""

    interval: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations; 0: none. Frequent ones show progress sooner, and take an
    engine from training each time."""

    path: RecipePath | None = None
    """File of held-out prompts, as `data.path` has it; relative to the recipe. None: the first
    ``prompts`` that the run trains on, each once, whose score counts what was learnt by heart
    too."""

    columns: dict[str, str] = {}
    """Column of the file under which each key of a row stands, as `data.columns` has it."""

    prompts: Annotated[int, Field(ge=1)] = 64
    """Prompts of one evaluation, at most. More make the score less noisy and hold the engine
    longer."""

    samples: Annotated[int, Field(ge=1)] = 1
    """Samples of each prompt. More make the score of each prompt less noisy and hold the engine
    longer."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Time one evaluation may hold its engine at the version it scores; then it is given up.
    Raise it for many prompts or long responses; a hung one is noticed later."""

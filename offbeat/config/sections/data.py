"""Defines section ``data`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config, RecipePath


class DataConfig(Config):
    """Source of prompts."""

    path: RecipePath | None = None
    """Prompts as JSON Lines or Parquet: a file, a directory, or
    `hf://datasets/OWNER/NAME[@REVISION]/FILES`; relative to the recipe. `*` matches several files.
    null: the environment generates prompts. On resume the content must be unchanged."""

    columns: dict[str, str] = {}
    """Column for each key of a row, as in `{prompt: problem, answer: solution}`; other columns are
    ignored. Dots reach into objects: `{answer: reward_model.ground_truth}`. Empty: keys are column
    names."""

    shuffle: bool = True
    """Visit the rows of each epoch in random order, from `seed`. false: file order, which keeps a
    curriculum."""

    allow_splits: bool = False
    """Allow a directory, here or in `eval`, in which some files are named after test or validation
    splits. Otherwise the run ends before its first step."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the rows, after which the run ends. null: no limit, `steps` decides."""

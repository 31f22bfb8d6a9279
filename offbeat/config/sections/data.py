"""Defines section ``data`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config, RecipePath


class DataConfig(Config):
    """Source of prompts."""

    path: RecipePath | None = None
    """JSON Lines or Parquet prompts: a file, a directory, or
    `hf://datasets/OWNER/NAME[@REVISION]/FILES`, relative to the recipe. `*` matches several files.
    null: the environment generates prompts. The content must be unchanged on resume."""

    columns: dict[str, str] = {}
    """Column of the file for each key of a row, as in `{prompt: problem, answer: solution}`. Other
    columns are ignored. Dots reach into objects: `{answer: reward_model.ground_truth}`. Empty: keys
    are column names."""

    shuffle: bool = True
    """Shuffle the rows in each epoch, seeded by `seed`. false: keep file order, for example for a
    curriculum."""

    allow_splits: bool = False
    """Allow a directory (here or in `eval`) with files named after test or validation splits.
    Without this, such a directory ends the run before its first step."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the rows before the run ends. null: only `steps` ends it."""

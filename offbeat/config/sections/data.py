"""Defines section ``data`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config, RecipePath


class DataConfig(Config):
    """Source of prompts."""

    path: RecipePath | None = None
    """File of prompts, one a row: JSON Lines or Parquet, or a directory of such files; relative to
    the recipe. Or files on the hub, `hf://datasets/OWNER/NAME[@REVISION]/FILES`. A `*` in the name of
    a file, or in FILES, names several. None: the environment makes its own. A resume wants the same
    content. JSON Lines is read and edited with any tool; Parquet is what data sets are published as,
    and needs no conversion; a revision keeps new runs from reading what was changed meanwhile."""

    columns: dict[str, str] = {}
    """Column of the file under which each key of a row stands, as in `{prompt: problem, answer:
    solution}`; a row then has these keys alone. A dotted name reaches into a column of objects, as
    in `{answer: reward_model.ground_truth}`. Empty: the keys are the columns' names."""

    shuffle: bool = True
    """Visit the rows of each epoch in an order drawn from ``seed``; off: in the order of the
    file, which keeps a curriculum but trains similar rows together."""

    allow_splits: bool = False
    """Whether a directory may have files named after test or validation rows next to others, here or
    in ``eval``. On reads all of them; off ends the run before its first step, because the test rows
    would be trained on."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the rows before the source is at its end, which ends the run; None: endless,
    ``steps`` decides. A bound keeps rows from being trained more often than intended."""

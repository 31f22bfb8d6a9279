"""Defines section ``data`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config, RecipePath


class DataConfig(Config):
    """Source of prompts."""

    path: RecipePath | None = None
    """JSON Lines file, one prompt a row; relative to the recipe. None: the environment makes
    its own."""

    shuffle: bool = True
    """Visit the rows of each epoch in an order drawn from ``seed``; off: in the order of the
    file, which keeps a curriculum but trains similar rows together."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the rows before the source is at its end, which ends the run; None: endless,
    ``steps`` decides. A bound keeps rows from being trained more often than intended."""

"""The base of every config model, and the marks a field can carry."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class RelativeToRecipe:
    """Marks a path that the loader makes absolute: relative to the recipe that names it."""


@dataclass(frozen=True, slots=True)
class InWords:
    """Says a constraint that no number says, for messages and ``config explain``."""

    text: str


RecipePath = Annotated[str, RelativeToRecipe()]

RunName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100),
    InWords("of letters, digits, dots, dashes and underscores, a letter or digit first"),
]
"""Fit to be the name of a directory."""


class Config(BaseModel):
    """An unknown key is an error, a value never changes, and every field says what it does."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

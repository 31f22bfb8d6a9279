"""The base of every config model."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """An unknown key is an error, a value never changes, and every field says what it does."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

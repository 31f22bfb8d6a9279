"""Defines section ``filters`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class FilterConfig(Config):
    """Finished groups that are not worth a place in a batch: dropped by reason, and replaced."""

    zero_variance: bool = False
    """Drop groups whose samples all have the same reward, and generate others (dynamic
    sampling)."""

    max_truncated_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop groups with a larger share of samples that ran out of tokens. null: keep them."""

    max_per_step: Annotated[int, Field(ge=1)] | None = None
    """Maximum groups filtered per step. Later ones are kept, so the result depends on arrival
    order. null: 10 times `groups_per_step`."""

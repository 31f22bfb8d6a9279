"""Defines section ``filters`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class FilterConfig(Config):
    """Finished groups that are not worth a place in a batch: dropped by reason, and replaced."""

    zero_variance: bool = False
    """Drop groups whose samples all got the same reward.

    They have no gradient (dynamic sampling).
    """

    max_truncated_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop groups of which more than this share of samples ran out of tokens. None: keep them."""

    max_per_step: Annotated[int, Field(ge=1)] | None = None
    """Groups filtered for one step before the next ones are kept whatever they are; which these are
    depends on arrival. None: ten times ``groups_per_step``."""

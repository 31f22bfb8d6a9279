"""Defines section ``filters`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class FilterConfig(Config):
    """Finished groups that are not worth a place in a batch: dropped by reason, and replaced."""

    zero_variance: bool = False
    """Drop groups whose samples all got the same reward: they have no gradient (dynamic
    sampling). Steps then hold only groups that teach something, and more is generated to fill
    them."""

    max_truncated_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop groups of which more than this share of samples ran out of tokens; None: keep them.
    A small share keeps rewards of unfinished answers out, and trains fewer of the prompts with
    long ones."""

    max_per_step: Annotated[int, Field(ge=1)] | None = None
    """Groups filtered for one step before the next ones are kept whatever they are, which
    depends on arrival; None: ten times ``groups_per_step``. More insist longer on useful
    groups, fewer bound what a step may generate in vain."""

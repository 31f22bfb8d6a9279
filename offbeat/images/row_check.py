"""Check of the pictures that a row of a data file names, or of their lack."""

from collections.abc import Mapping
from typing import Final

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.row_checks import LOOK_AWAY
from offbeat.images.rows import names_pictures, pictures_problem, place_problem

_READ_PICTURES: Final = ("function", "custom")
"""Environments whose prompts may have pictures, which the model's processor encodes."""


def row_problem(config: EnvironmentConfig, row: Mapping[str, object]) -> str | None:
    """Return why the pictures of a row, or their lack, cannot be used; None if they can."""
    if not names_pictures(row):
        if config.name in LOOK_AWAY:
            return None
        return place_problem(row, has_places=config.images is not None)
    if config.images is not None and config.name in _READ_PICTURES:
        return pictures_problem(row, config.images.max_pictures)
    if config.name in LOOK_AWAY:
        return None
    fix = "set environment.images" if config.name in _READ_PICTURES else "it reads text alone"
    return (
        f"names a picture under 'image' or 'images', which environment.name={config.name} would not "
        f"show to the model: {fix}, or name the columns that are needed in data.columns"
    )

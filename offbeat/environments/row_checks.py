"""Chooses the check of a prompt file's rows, by the environment that reads them."""

from collections.abc import Mapping
from functools import partial
from typing import Final

from offbeat.config.graders import GRADERS
from offbeat.config.sections.environment import EnvironmentConfig, RewardConfig
from offbeat.environments.answer_rows import answer_problem
from offbeat.environments.demonstrations import row_problem as demonstration_problem
from offbeat.environments.gsm8k import row_problem as question_problem
from offbeat.environments.picture_rows import names_pictures, pictures_problem, place_problem
from offbeat.environments.prompt_files import RowCheck, row_problem

_ROW_CHECKS: Final[dict[str, RowCheck]] = {
    "gsm8k": question_problem,
    "agent": lambda _: None,
    "demonstrations": demonstration_problem,
}
"""Row checks of environments that need more than a ``prompt`` or ``messages``, or neither."""

_READ_PICTURES: Final = ("function", "custom")
"""Environments whose prompts may have pictures, which the model's processor encodes."""

_LOOK_AWAY: Final = ("agent", "custom")
"""Environments that may use a key ``image`` for something else; the others would drop a picture."""


def row_check(config: EnvironmentConfig) -> RowCheck:
    """Return the check of the rows that this environment reads."""
    own = _row_check(config) or row_problem
    return partial(_whole, own, config)


def _whole(own: RowCheck, config: EnvironmentConfig, row: Mapping[str, object]) -> str | None:
    if not names_pictures(row):
        problem = own(row)
        if problem is None and config.name not in _LOOK_AWAY:
            return place_problem(row, has_places=config.images is not None)
        return problem
    if config.images is not None and config.name in _READ_PICTURES:
        return own(row) or pictures_problem(row, config.images.max_pictures)
    if config.name in _LOOK_AWAY:
        return own(row)
    fix = "set environment.images" if config.name in _READ_PICTURES else "it reads text alone"
    return (
        f"names a picture under 'image' or 'images', which environment.name={config.name} would not "
        f"show to the model: {fix}, or name the columns that are needed in data.columns"
    )


def _row_check(config: EnvironmentConfig) -> RowCheck | None:
    if config.name != "function":
        return _ROW_CHECKS.get(config.name)
    single = {"": RewardConfig(target=config.target or "", options=config.options)}
    for each in (config.rewards or single).values():
        grader = GRADERS.get(each.target)
        if grader is not None and grader.answer_key:
            key = str(each.options.get("answer_key", grader.answer_key))
            return lambda row: row_problem(row) or answer_problem(row, key)
    return None

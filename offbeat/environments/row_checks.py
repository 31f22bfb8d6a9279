"""Chooses by environment how the rows of a prompt file are checked and compared."""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, cast

from offbeat.config.graders import GRADERS
from offbeat.config.sections.environment import EnvironmentConfig, RewardConfig
from offbeat.environments.demonstrations import is_answer
from offbeat.environments.demonstrations import row_problem as demonstration_problem
from offbeat.environments.gsm8k import row_problem as question_problem
from offbeat.environments.media_prompts import find_media
from offbeat.environments.prompt_files import RowCheck, ShownPart
from offbeat.environments.prompt_row import (
    OF_MESSAGES,
    answer_problem,
    of_messages,
    row_problem,
    unshown_problem,
)
from offbeat.environments.text import in_one_form

_ROW_CHECKS: Final[dict[str, RowCheck]] = {
    "gsm8k": question_problem,
    "demonstrations": demonstration_problem,
}
"""Row checks of environments that need more keys than ``prompt`` or ``messages``, or others."""

_SHOWN: Final = ("prompt", "messages", *OF_MESSAGES)
"""Keys of a row that change the prompt, in addition to the keys of media."""


def reads_any_key(config: EnvironmentConfig) -> bool:
    """Return whether a prompt may be made from any key of a row.

    Such an environment may use media keys for something else. Any other environment would silently
    drop the media.
    """
    return config.name == "custom" or config.reads_any_row


def row_check(config: EnvironmentConfig) -> RowCheck:
    """Return the check of the rows that this environment reads."""
    own = _row_check(config) or row_problem
    return partial(_whole, own, config)


def shown_part(config: EnvironmentConfig) -> ShownPart:
    """Return the function that selects the part of a row from which the prompt is made.

    An agent or a custom environment may make a prompt from anything in a row.
    """
    if reads_any_key(config):
        return dict
    if config.name == "gsm8k":
        return itemgetter("question")
    return partial(_shown, is_demonstration=config.name == "demonstrations")


def _shown(row: Mapping[str, object], *, is_demonstration: bool) -> object:
    read = {key: of_messages(row, key) for key in OF_MESSAGES if key in row}
    keys = (*_SHOWN, *find_media().ROW_KEYS)
    shown = {key: value for key in keys if (value := read.get(key, row.get(key)))}
    if "messages" in shown:
        messages = cast("Sequence[Mapping[str, Any]]", shown["messages"])
        if is_demonstration:
            answers = [place for place, each in enumerate(messages) if is_answer(each)]
            messages = messages[: answers[-1]]
        shown["messages"] = [in_one_form(message) for message in messages]
    return shown


def _whole(own: RowCheck, config: EnvironmentConfig, row: Mapping[str, object]) -> str | None:
    problem = own(row)
    if problem is None and not reads_any_key(config):
        is_answered = config.name == "demonstrations"
        problem = unshown_problem(row, makes_chat=config.name == "gsm8k", is_answered=is_answered)
    return problem or find_media().row_problem(config, row)


def _row_check(config: EnvironmentConfig) -> RowCheck | None:
    if config.reads_any_row:
        return lambda _: None
    if config.name != "function":
        return _ROW_CHECKS.get(config.name)
    single = {"": RewardConfig(target=config.target or "", options=config.options)}
    for each in (config.rewards or single).values():
        grader = GRADERS.get(each.target)
        if grader is not None and grader.answer_key:
            key = str(each.options.get("answer_key", grader.answer_key))
            return lambda row: row_problem(row) or answer_problem(row, key)
    return None

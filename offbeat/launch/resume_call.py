"""Composes calls and commands about a run, for messages: to resume it, and to preview it."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from offbeat.config.by_value import given, is_by_value, is_given
from offbeat.config.run import RunConfig
from offbeat.environments.inputs import ADVANTAGE, LOSS
from offbeat.runs.directory import CONFIG
from offbeat.runs.inputs import targets

_ARGUMENT_BY_KEY: Final = {LOSS: "loss", ADVANTAGE: "advantage"}
_ONE: Final = "environment.target"
_NAMED: Final = re.compile(r"environment\.rewards\.([\w-]+)\.target")
_CHOSEN: Final = "..."
"""Stands for an object that has no name of its own."""


def compose_resume_call(
    directory: Path, config: RunConfig, *, failed_in_user_code: bool = False
) -> str:
    """Return the call that resumes a run from any process.

    It gives every object again that was given by value. If the run failed in code of the user, it
    allows changed code, because the user will change it.
    """
    by_value = {key: each for key, each in targets(config).items() if is_by_value(each)}
    arguments = [repr(str(directory)), *_compose_objects(config, by_value)]
    if failed_in_user_code and targets(config):
        arguments.append("changed_code=True")
    return f"offbeat.resume({', '.join(arguments)})"


def compose_resume_command(
    directory: Path, config: RunConfig, *, failed_in_user_code: bool = False
) -> str:
    """Return the command that resumes a run; it allows changed code as the call does."""
    allowed = " --changed-code" if failed_in_user_code and targets(config) else ""
    return f"offbeat train --resume {shlex.quote(str(directory))}{allowed}"


def compose_preview(directory: Path, *, in_python: bool) -> str:
    """Return the call, or the command, that previews the recipe of a run."""
    if in_python:
        return f"offbeat.open_run({str(directory)!r}).preview()"
    return f"offbeat preview {shlex.quote(str(directory / CONFIG))}"


def _compose_objects(config: RunConfig, by_value: Mapping[str, str]) -> list[str]:
    """Return arguments that give the objects again, by key of the recipe."""
    arguments, rewards, others = list[str](), list[str](), list[str]()
    for key, target in by_value.items():
        name = _find_name(target)
        if key == _ONE and config.environment.name in ("function", "agent"):
            arguments.append(f"{'agent' if config.environment.is_agent else 'reward'}={name}")
        elif key in _ARGUMENT_BY_KEY:
            arguments.append(f"{_ARGUMENT_BY_KEY[key]}={name}")
        elif named := _NAMED.fullmatch(key):
            rewards.append(f"{named[1]!r}: {name}")
        else:
            others.append(f"{key!r}: {name}")
    if rewards:
        arguments.append(f"reward={{{', '.join(rewards)}}}")
    return [*arguments, f"**{{{', '.join(others)}}}"] if others else arguments


def _find_name(target: str) -> str:
    """Return the name by which the user's program knows an object, or a placeholder."""
    name = str(getattr(given(target), "__name__", "")) if is_given(target) else ""
    return name if name.isidentifier() else _CHOSEN

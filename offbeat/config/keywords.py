"""Keyword arguments of Python as overrides of a recipe."""

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from offbeat.config import schema
from offbeat.config.by_value import give
from offbeat.config.problems import ABSENT, ConfigError, Location, Problem


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return ``key=value`` of each keyword, as ``load_recipe`` reads them.

    A keyword is a key of a recipe, as ``trainer``, a dotted one, or the last part of one if there is
    only one of that name: ``learning_rate``. An object that can be called is given by value.

    Raises:
        ConfigError: A name fits several keys, or a value is of no kind that a recipe has.
    """
    return [f"{_key(name)}={_text(name, value)}" for name, value in settings.items()]


def _key(name: str) -> str:
    if "." in name or schema.known(name) is not None:
        return name
    fitting = _by_last_part().get(name, ())
    if len(fitting) > 1:
        shown = ", ".join(fitting)
        first = fitting[0]
        section, _, last = first.rpartition(".")
        hint = f"Write {section}={{{last!r}: ...}}, or **{{{first!r}: ...}}."
        where = Location(f"argument {name}")
        raise ConfigError((Problem(where, "", ABSENT, f"{name} is one of: {shown}", hint),))
    return fitting[0] if fitting else name


@cache
def _by_last_part() -> dict[str, tuple[str, ...]]:
    """Return the keys by their last part, except keys below a name that a recipe chooses."""
    found = dict[str, tuple[str, ...]]()
    for key, known in schema.known_keys().items():
        if "." in key and schema.NAME not in key.split("."):
            found[known.leaf] = (*found.get(known.leaf, ()), key)
    return found


def _text(name: str, value: object) -> str:
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        where = Location(f"argument {name}")
        hint = "Give numbers, text, lists and dicts, a path, a function or a class."
        raise ConfigError((Problem(where, "", ABSENT, str(error), hint),)) from error


def _plain(value: Any) -> Any:  # noqa: ANN401 -- what json does not know
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))  # pyright: ignore[reportUnknownArgumentType] -- of any path
    if callable(value):
        return give(value)
    if hasattr(value, "item"):  # a number of numpy
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}")

"""Converts arguments of ``offbeat.train`` to overrides, and names them in a recipe's problems."""

import difflib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final, cast

from offbeat.config import schema
from offbeat.config.by_value import give
from offbeat.config.normalise import meant
from offbeat.config.peer_keys import find_note, matching_keys
from offbeat.config.problems import ABSENT, ConfigError, Location, Problem
from offbeat.config.sources import is_override, overridden_key

_CLOSE: Final = 0.75
_ARGUMENTS: Final = {
    "model.path": "model=DIRECTORY",
    "data.path": "prompts=ROWS",
    "eval.path": "eval_prompts=ROWS",
    "environment.target": "reward=FUNCTION",
    "environment.rewards.NAME.weight": "reward={'NAME': {'target': FUNCTION, 'weight': 0.5}, ...}",
}
"""Arguments of ``offbeat.train`` in place of keys, for messages about other libraries' names."""

_ARGUMENT_BY_KEY: Final = {
    "model": "model",
    "model.path": "model",
    "data.path": "prompts",
    "eval.path": "eval_prompts",
    "environment.name": "reward",
    "environment.target": "reward",
    "environment.rewards": "reward",
    "algorithm.loss": "loss",
    "algorithm.loss.name": "loss",
    "algorithm.loss.target": "loss",
}
"""Arguments of ``offbeat.train`` by the recipe key that they set."""


def format_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return ``key=value`` of each keyword, as ``load_recipe`` reads them.

    A keyword is a section or a dotted key of a recipe. The last part of a key suffices if it is
    unique, as in ``learning_rate``. A callable object is passed by value.

    Raises:
        ConfigError: A name fits several keys, a key has two values, or a value has a type that no
            recipe can have.
    """
    key_of = {name: find_key(name) for name in settings}
    given = dict[str, tuple[str, object]]()
    for name, value in settings.items():
        for key, setting in _leaves(key_of[name], value):
            other, former = given.setdefault(key, (name, setting))
            if former is not setting and former != setting:
                problem = f"{key} is {setting!r} here, but {former!r} in {other}"
                raise bad_argument(name, problem, "Give it once.")
    return [f"{key}={_text(name, key, settings[name])}" for name, key in key_of.items()]


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the key and value of each setting in a value; a section sets each of its keys."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for below, inner in cast("Mapping[object, object]", value).items():
        yield from _leaves(f"{key}.{below}", inner)


def _is_known_name(name: str) -> bool:
    """Return whether a keyword is a recipe key, or another library's key with a known message."""
    if "." in name or schema.known(name) is not None or name in _by_last_part():
        return True
    return bool(matching_keys(name, least=1) or find_note(name))


def find_key(name: str) -> str:
    """Return the key of a recipe that a keyword sets; return an unknown name unchanged.

    Raises:
        ConfigError: It fits several keys, or an argument.
    """
    if "." in name or schema.known(name) is not None:
        return name
    fitting = _by_last_part().get(name, ())
    if len(fitting) > 1:
        raise bad_argument(name, f"{name} is one of: {', '.join(fitting)}", _as_key(fitting[0]))
    if fitting:
        return fitting[0]
    joined = (f"{name[:at]}.{name[at + 1 :]}" for at, each in enumerate(name) if each == "_")
    if key := next((each for each in joined if schema.known(each) is not None), ""):
        raise bad_argument(name, f"{name} is the key {key}", _as_key(key))
    meant = [_ARGUMENTS[key] for key in matching_keys(name, least=1) if key in _ARGUMENTS]
    if meant:
        raise bad_argument(name, "it is not an argument here", f"Write {meant[0]}.")
    return name


def _as_key(key: str) -> str:
    section, _, last = key.rpartition(".")
    return f"Write {section}={{{last!r}: ...}}, or **{{{key!r}: ...}}."


def bad_argument(name: str, problem: str, hint: str) -> ConfigError:
    """Return the error of an argument passed in Python."""
    return ConfigError((Problem(Location(f"argument {name}"), "", ABSENT, problem, hint),))


@cache
def _by_last_part() -> dict[str, tuple[str, ...]]:
    """Return the keys by their last part, except keys below a name that a recipe chooses."""
    found = dict[str, tuple[str, ...]]()
    for key, known in schema.known_keys().items():
        if "." in key and schema.NAME not in key.split("."):
            found[known.leaf] = (*found.get(known.leaf, ()), key)
    return found


def _text(name: str, key: str, value: object) -> str:
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        if "." not in key and schema.known(key) is None:
            valid = [each.leaf for each in schema.children("")]
            raise bad_argument(name, "it is not a recipe key", meant(key, valid)) from error
        hint = "Give numbers, text, lists and dicts, a path, a function or a class."
        raise bad_argument(name, str(error), hint) from error


def _plain(value: Any) -> Any:  # noqa: ANN401 -- what json does not know
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))  # pyright: ignore[reportUnknownArgumentType] -- of any path
    if callable(value):
        return give(value)
    if hasattr(value, "item"):  # a numpy number
        return value.item()
    raise TypeError(f"{value!r} has the type {type(value).__name__}")


# --- arguments of a call --------------------------------------------------------------------------


def check_names(
    call: Callable[..., Any], others: Iterable[Callable[..., Any]], settings: Mapping[str, Any]
) -> None:
    """Refuse keywords that are misspelt arguments of ``call``, or arguments of ``others``.

    Raises:
        ConfigError: A keyword is refused. The error names the first.
    """
    if "rewards" in settings and not isinstance(settings["rewards"], Mapping):
        raise bad_argument("rewards", "it is not an argument here", "Did you mean `reward`?")
    own = _list_arguments(call)
    for name in settings:
        if _is_known_name(name):
            continue
        for other in others:
            if name in _list_arguments(other):
                hint = f"It is an argument of offbeat.{other.__name__}."
                raise bad_argument(name, f"offbeat.{call.__name__} does not have it", hint)
        if near := difflib.get_close_matches(name, own, n=1, cutoff=_CLOSE):
            raise bad_argument(name, "it is not an argument here", f"Did you mean `{near[0]}`?")


def _list_arguments(call: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(call).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


def name_arguments(error: ConfigError, settings: Mapping[str, Any]) -> ConfigError:
    """Return the error with the call's arguments in place of overrides."""
    is_agent = settings.get("environment.name") == "agent"
    name_by_key = {find_key(name): _ARGUMENT_BY_KEY.get(name, name) for name in settings}
    if is_agent:
        name_by_key |= {"environment.name": "agent", "environment.target": "agent"}
    return ConfigError(tuple(_name_argument(each, name_by_key) for each in error.problems))


def _name_argument(problem: Problem, name_by_key: Mapping[str, str]) -> Problem:
    if not is_override(problem.location):
        return problem
    name = name_by_key.get(overridden_key(problem.location))
    return problem if name is None else replace(problem, location=Location(f"argument {name}"))

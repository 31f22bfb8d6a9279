"""Checks the names of a call's arguments, and names them in problems of the recipe they make."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from offbeat.config.keywords import bad_argument, find_key, is_known_name
from offbeat.config.problems import ConfigError, Location, Problem
from offbeat.config.sources import is_override, overridden_key

_CLOSE: Final = 0.75
_ARGUMENTS: Final = {
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
"""Arguments of ``offbeat.train`` by the key of the recipe that they set."""


def check_names(
    call: Callable[..., Any], others: Iterable[Callable[..., Any]], settings: Mapping[str, Any]
) -> None:
    """Refuse keywords that are misspelt arguments of ``call``, or arguments of ``others``.

    Raises:
        ConfigError: There is one. The error names the first.
    """
    if "rewards" in settings and not isinstance(settings["rewards"], Mapping):
        raise bad_argument("rewards", "it is no argument here", "Did you mean `reward`?")
    own = _list_arguments(call)
    for name in settings:
        if is_known_name(name):
            continue
        for other in others:
            if name in _list_arguments(other):
                hint = f"It is an argument of offbeat.{other.__name__}."
                raise bad_argument(name, f"offbeat.{call.__name__} does not have it", hint)
        if near := difflib.get_close_matches(name, own, n=1, cutoff=_CLOSE):
            raise bad_argument(name, "it is no argument here", f"Did you mean `{near[0]}`?")


def _list_arguments(call: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(call).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


def name_arguments(error: ConfigError, settings: Mapping[str, Any]) -> ConfigError:
    """Return the error with arguments of the call in the place of overrides, which nobody wrote."""
    is_agent = settings.get("environment.name") == "agent"
    name_by_key = {find_key(name): _ARGUMENTS.get(name, name) for name in settings}
    if is_agent:
        name_by_key |= {"environment.name": "agent", "environment.target": "agent"}
    return ConfigError(tuple(_name_argument(each, name_by_key) for each in error.problems))


def _name_argument(problem: Problem, name_by_key: Mapping[str, str]) -> Problem:
    if not is_override(problem.location):
        return problem
    name = name_by_key.get(overridden_key(problem.location))
    return problem if name is None else replace(problem, location=Location(f"argument {name}"))

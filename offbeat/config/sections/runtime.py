"""Defines section ``runtime`` of a recipe."""

import re
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator

from offbeat.config.base import Config, InWords

_NAME: Final = re.compile(r"(?!RAY_)[A-Za-z_][A-Za-z0-9_]*")


def _variables(value: Any) -> Any:  # noqa: ANN401 - whatever YAML makes
    if not isinstance(value, dict):
        return value
    entries = cast("dict[object, object]", value)
    for name, text in entries.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValueError(f"{name!r} is no name for a variable")
        if isinstance(text, bool) or not isinstance(text, str | int | float) or "\0" in str(text):
            raise ValueError(f"{name} is neither text nor a number")
    return {name: str(text) for name, text in entries.items()}


class RuntimeConfig(Config):
    """Processes that execute the run, and their environment. `runtime: local` sets the backend."""

    backend: Literal["ray", "local"] = "ray"
    """ray: each part is an actor, on one machine or on a cluster. local: all parts in one process,
    without Ray, for one trainer rank and embedded engines; a crash of the process ends the run, and
    `--resume` continues it."""

    env: Annotated[
        dict[str, str],
        BeforeValidator(_variables),
        InWords("of names, none beginning with RAY_, to text or numbers; a switch is 0 or 1"),
    ] = {}
    """Environment variables of every process, as in `{NCCL_DEBUG: INFO}`. They override existing
    ones and are readable in the recipe. On a cluster, the driver's `HF_*`, `NCCL_*` and similar
    variables are passed on too."""

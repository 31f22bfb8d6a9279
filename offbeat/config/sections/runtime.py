"""Defines sections ``runtime`` and ``supervision`` of a recipe: processes, and limits that end a run."""

import re
from typing import Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator, Field

from offbeat.config.base import Config, InWords

_NAME: Final = re.compile(r"(?!RAY_)[A-Za-z_][A-Za-z0-9_]*")


def _variables(value: Any) -> Any:  # noqa: ANN401 - whatever YAML makes
    if not isinstance(value, dict):
        return value
    entries = cast("dict[object, object]", value)
    for name, text in entries.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValueError(f"{name!r} is not a valid variable name")
        if isinstance(text, bool) or not isinstance(text, str | int | float) or "\0" in str(text):
            raise ValueError(f"{name} is neither text nor a number")
    return {name: str(text) for name, text in entries.items()}


class RuntimeConfig(Config):
    """Processes that execute the run, and their environment. `runtime: local` sets the backend."""

    backend: Literal["ray", "local"] = "ray"
    """ray: each part is an actor, on one machine or a cluster. local: all parts in one process
    without Ray, for one trainer rank and embedded engines. If that process crashes, the run ends,
    and `--resume` continues it."""

    env: Annotated[
        dict[str, str],
        BeforeValidator(_variables),
        InWords(
            "of name to text or number; names must not start with RAY_; write booleans as 0 or 1"
        ),
    ] = {}
    """Environment variables of every process, as in `{NCCL_DEBUG: INFO}`. They override existing
    ones. Their values are readable in the recipe. On a cluster, the driver's `HF_*`, `NCCL_*` and
    similar variables are also passed on."""


class SupervisionConfig(Config):
    """Limits after which the run ends."""

    stall_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """End the run after this many seconds without progress, unless a call is still within its
    deadline."""

    shutdown_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds for each actor to close before it is killed."""

    signal_grace_s: Annotated[float, Field(gt=0)] = 25.0
    """Seconds to end cleanly after SIGINT, SIGTERM or SIGHUP, including the step in progress and a
    last checkpoint. Keep it below the sender's kill time, often 30 s. If nothing kills the process,
    as in a notebook, raise it for a large model."""

    wall_clock_limit_s: Annotated[float, Field(gt=0)] | None = None
    """Stop the run this many seconds after the command started, like `offbeat control RUN stop`.
    null: no limit. Leave time for a step and a checkpoint before the scheduler's limit."""

    controller_restart_budget: Annotated[int, Field(ge=0)] = 3
    """Times the run may replace a dead controller. One more ends the run."""

    snapshot_records: Annotated[int, Field(ge=1)] = 20_000
    """Journal records between two snapshots of the run's state. With more than a thousand
    outstanding groups, it is at least 4 records for each group beyond the thousand. With fewer
    records, a new controller starts faster."""

"""Defines section ``supervision`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class SupervisionConfig(Config):
    """Limits after which the run ends."""

    stall_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """End the run when nothing moves for this long and no call is within its own deadline.
    Shorter frees the machines of a stuck run sooner, longer tolerates pauses of the environment
    or the disk."""

    shutdown_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Time each actor gets to close before it is killed. Raise it where closing writes much, as
    each hung actor delays the end by it."""

    signal_grace_s: Annotated[float, Field(gt=0)] = 10.0
    """Time a run gets to end in order after SIGINT or SIGTERM, a last checkpoint included.
    Raise it to fit a checkpoint of a large model, but keep it below the time after which the
    sender of the signal kills: often 30 s."""

    wall_clock_limit_s: Annotated[float, Field(gt=0)] | None = None
    """End after this time, counted from the start of the command, as ``offbeat control RUN
    stop`` does; None: no limit. Set it a step and a checkpoint below the limit of a scheduler,
    which would lose the work since the last checkpoint."""

    controller_restart_budget: Annotated[int, Field(ge=0)] = 3
    """Times a controller that died is replaced, over the run; one more ends it. Raise it for
    long runs; a fault that returns then repeats more often before the run ends."""

    snapshot_records: Annotated[int, Field(ge=1)] = 20_000
    """Journal records between two snapshots, four for each group beyond a thousand outstanding
    if that is more. Fewer make a new controller start faster, as it reads what is behind the
    last one; more write less."""

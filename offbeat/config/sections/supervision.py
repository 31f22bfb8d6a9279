"""Defines section ``supervision`` of a recipe."""

from typing import Annotated

from pydantic import Field

from offbeat.config.base import Config


class SupervisionConfig(Config):
    """Limits after which the run ends."""

    stall_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """End the run if nothing moves for this long and no call is within its own deadline."""

    shutdown_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Time for each actor to close before it is killed."""

    signal_grace_s: Annotated[float, Field(gt=0)] = 10.0
    """Time to end in order after SIGINT or SIGTERM, with a last checkpoint. Keep it below the
    sender's kill time, often 30 s."""

    wall_clock_limit_s: Annotated[float, Field(gt=0)] | None = None
    """End like `offbeat control RUN stop` this long after the command started. null: no limit.
    Leave a step and a checkpoint before the scheduler's limit."""

    controller_restart_budget: Annotated[int, Field(ge=0)] = 3
    """Times the run may replace a dead controller; one more ends it."""

    snapshot_records: Annotated[int, Field(ge=1)] = 20_000
    """Journal records between two snapshots, or 4 per outstanding group beyond a thousand if that
    is more. Fewer speed up the start of a new controller."""

"""Checks what a restart after the loss of the trainer would cost."""

from collections.abc import Iterator

from offbeat.config.run import RunConfig
from offbeat.launch.checks.finding import Finding, ok, warning


def check_checkpoints(config: RunConfig) -> Iterator[Finding]:
    """Report how many steps a restart of the trainer repeats at most."""
    interval, steps = config.checkpoint.interval, config.steps
    if interval:
        most = min(interval, steps)
        yield ok("checkpoints", f"a restart of the trainer trains at most {most} steps again")
        return
    groups = steps * config.groups_per_step
    yield warning(
        "checkpoints",
        f"checkpoint.interval=0: after a restart of the trainer, or a resume of a killed run, all steps "
        f"are trained again from the initial model, up to {steps:,} with {groups:,} groups. The "
        "journal is read back to its beginning for that",
        "Set checkpoint.interval to the number of steps that may be lost.",
    )

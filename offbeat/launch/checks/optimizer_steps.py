"""Checks of what the optimizer steps of a run add up to: its warm-up, and ranks without a group."""

from collections.abc import Iterator

from offbeat.config.limits import trainer_replicas
from offbeat.config.run import RunConfig
from offbeat.config.schedule_in_steps import schedule_in_steps
from offbeat.launch.checks.finding import Finding, warning

_OPTIMIZER = "trainer.optimizer"


def check_optimizer_steps(config: RunConfig) -> Iterator[Finding]:
    """Warn of a peak that no step reaches, and of minibatches that leave ranks idle."""
    if config.trainer.backend != "stub":
        yield from _warm_up_ends(config)
        yield from _minibatches_fill_the_ranks(config)


def _warm_up_ends(config: RunConfig) -> Iterator[Finding]:
    given = config.trainer.optimizer
    warmup = schedule_in_steps(config, given).warmup_steps
    if warmup <= config.steps:
        return
    key, written = f"{_OPTIMIZER}.warmup_steps", f"{_OPTIMIZER}.warmup_steps={warmup}"
    if given.warmup_samples:
        key = f"{_OPTIMIZER}.warmup_samples"
        written = f"{key}={given.warmup_samples}, {warmup} steps,"
    peak = given.learning_rate
    yield warning(
        "schedule",
        f"{written} is more than steps={config.steps}: the rate rises to {peak * config.steps / warmup:.3g} "
        f"at the last step, and never to {_OPTIMIZER}.learning_rate={peak:g}",
        f"Lower {key}, unless this is the beginning of a longer run.",
    )


def _minibatches_fill_the_ranks(config: RunConfig) -> Iterator[Finding]:
    minibatches, ranks = config.algorithm.minibatches, trainer_replicas(config.trainer)
    least = config.groups_per_step // minibatches
    if minibatches == 1 or least >= ranks:
        return
    most = max(1, config.groups_per_step // ranks)
    yield warning(
        "minibatches",
        f"algorithm.minibatches={minibatches} of groups_per_step={config.groups_per_step} have "
        f"{least} groups or one more, for {ranks} data-parallel ranks: in each optimizer step some "
        "wait for the others",
        f"Set algorithm.minibatches to {most} or less, or groups_per_step to {minibatches * ranks} or more.",
    )

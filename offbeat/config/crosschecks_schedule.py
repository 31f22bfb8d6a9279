"""Finds learning-rate schedules that cannot be followed, and says what to set instead."""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.run import RunConfig
from offbeat.config.schedule_in_steps import schedule_in_steps
from offbeat.config.sections.optimizer import OptimizerConfig

_OPTIMIZER = "trainer.optimizer"


def schedule_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield a minimum above the peak, and keys that the schedule does not read or lacks."""
    if config.trainer.backend == "stub":
        return
    given = config.trainer.optimizer
    yield from _counted_once(given)
    optimizer = schedule_in_steps(config, given)
    least, decay = optimizer.min_learning_rate, optimizer.decay_steps
    if least > optimizer.learning_rate:
        yield Clash(
            (f"{_OPTIMIZER}.min_learning_rate", f"{_OPTIMIZER}.learning_rate"),
            f"{_OPTIMIZER}.min_learning_rate={least:g} is above the peak, "
            f"{_OPTIMIZER}.learning_rate={optimizer.learning_rate:g}: the rate would rise",
            f"Set {_OPTIMIZER}.min_learning_rate to less.",
        )
    if least and optimizer.schedule == "constant":
        yield Clash(
            (f"{_OPTIMIZER}.min_learning_rate", f"{_OPTIMIZER}.schedule"),
            f"{_OPTIMIZER}.min_learning_rate={least:g} is not used: "
            f"{_OPTIMIZER}.schedule=constant never falls",
            f"Set {_OPTIMIZER}.schedule to cosine, linear or wsd, or leave it out.",
        )
    if (decay is None) == (optimizer.schedule == "wsd"):
        is_missing = decay is None
        yield Clash(
            (f"{_OPTIMIZER}.decay_steps", f"{_OPTIMIZER}.schedule"),
            f"{_OPTIMIZER}.schedule=wsd needs {_OPTIMIZER}.decay_steps or decay_samples"
            if is_missing
            else f"{_OPTIMIZER}.decay_steps={decay} is not used: "
            f"{_OPTIMIZER}.schedule={optimizer.schedule}",
            "Set it to the number of last steps that decay; a tenth to a fifth of the run is usual."
            if is_missing
            else f"Set {_OPTIMIZER}.schedule to wsd, or leave it out.",
        )
    if decay is not None and decay + optimizer.warmup_steps > config.steps:
        yield Clash(
            (f"{_OPTIMIZER}.decay_steps", f"{_OPTIMIZER}.warmup_steps", "steps"),
            f"{_OPTIMIZER}.decay_steps={decay} and {_OPTIMIZER}.warmup_steps="
            f"{optimizer.warmup_steps} are more than steps={config.steps}: the peak is never reached",
            f"Set {_OPTIMIZER}.decay_steps to {max(1, config.steps - optimizer.warmup_steps)} or less.",
        )


def _counted_once(optimizer: OptimizerConfig) -> Iterator[Clash]:
    pairs = (
        ("warmup", optimizer.warmup_steps, optimizer.warmup_samples),
        ("decay", optimizer.decay_steps, optimizer.decay_samples),
    )
    for what, steps, samples in pairs:
        if steps and samples:
            yield Clash(
                (f"{_OPTIMIZER}.{what}_steps", f"{_OPTIMIZER}.{what}_samples"),
                f"{_OPTIMIZER}.{what}_steps={steps} and {_OPTIMIZER}.{what}_samples={samples} are two "
                "lengths of one phase",
                "Leave one of them out.",
            )

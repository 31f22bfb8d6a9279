"""Learning-rate schedules as functions of the number of applied steps. Pure."""

import math

from offbeat.config.sections.optimizer import OptimizerConfig


def learning_rate(config: OptimizerConfig, applied: int, total: int) -> float:
    """Return the learning rate of the step that follows ``applied`` steps, of ``total`` in the run.

    Warm-up rises linearly from 0 and reaches the peak with step ``warmup_steps``; linear and cosine
    then fall to reach 0 when the last step is done. No step is taken at 0 before the end.
    """
    if applied < config.warmup_steps:
        return config.learning_rate * (applied + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    falling = max(1, total - config.warmup_steps)
    done = min(1.0, (applied - config.warmup_steps) / falling)
    if config.schedule == "linear":
        return config.learning_rate * (1 - done)
    return config.learning_rate * (1 + math.cos(math.pi * done)) / 2

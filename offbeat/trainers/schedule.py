"""Learning-rate schedules as functions of the number of applied steps. Pure."""

import math

from offbeat.config.sections.optimizer import OptimizerConfig


def learning_rate(config: OptimizerConfig, applied: int, total: int) -> float:
    """Return the learning rate of the step that follows ``applied`` steps, of ``total`` in the run.

    Warm-up rises linearly from 0 and reaches the peak with step ``warmup_steps``; linear and cosine
    then fall to reach ``min_learning_rate`` when the last step is done, and ``wsd`` does so over
    ``decay_steps``, by ``1 - sqrt`` (arXiv:2405.18392, section 3.1; Megatron-LM's ``minus_sqrt``).
    Without a minimum no step is taken at 0 before the end.
    """
    if applied < config.warmup_steps:
        return config.learning_rate * (applied + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    begin = config.warmup_steps
    if config.schedule == "wsd":
        begin = max(begin, total - (config.decay_steps or 0))
    done = min(1.0, max(0.0, (applied - begin) / max(1, total - begin)))
    share = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "wsd": 1 - math.sqrt(done),
    }[config.schedule]
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * share

"""Learning-rate schedules that a recipe gives in samples, as the steps that trainers count."""

from offbeat.config.run import RunConfig
from offbeat.config.sections.optimizer import OptimizerConfig


def schedule_in_steps(config: RunConfig, optimizer: OptimizerConfig) -> OptimizerConfig:
    """Return the optimizer's section with warm-up and decay in steps; keys in samples are None.

    Samples are those of whole batches: a step that trained fewer, because groups were dropped,
    counts like the others. So the schedule follows from the version alone, after a resume as well.
    """
    per_step = config.groups_per_step * config.samples_per_group
    counts = {"warmup": optimizer.warmup_samples, "decay": optimizer.decay_samples}
    changes: dict[str, int | None] = {}
    for what, samples in counts.items():
        if samples is not None:
            changes[f"{what}_steps"] = -(-samples // per_step)
            changes[f"{what}_samples"] = None
    return optimizer.model_copy(update=changes)

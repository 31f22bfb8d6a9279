"""Checks that the megatron trainer knows a model and can divide it, from its config alone.

transformers, whose import takes seconds, is imported only if a recipe needs it.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import MegatronTrainerConfig
from offbeat.launch.checks.finding import Finding, error, ok, size

_LAYOUT: Final = "layout"


def check_layout(config: RunConfig) -> Iterator[Finding]:
    """Check the parallel sizes of a megatron trainer, and say what its largest rank holds."""
    trainer = config.trainer
    if not isinstance(trainer, MegatronTrainerConfig):
        return
    from offbeat.trainers.errors import UntrainableModel
    from offbeat.trainers.megatron.architecture import (
        check_balanced,
        check_recomputed,
        read_architecture,
    )
    from offbeat.trainers.megatron.layout import grid_of
    from offbeat.trainers.megatron.layout_choice import fitting_sizes
    from offbeat.trainers.megatron.layout_rules import broken_rules
    from offbeat.trainers.megatron.rank_bytes import largest_rank

    try:
        architecture = read_architecture(config.model.path)
        check_balanced(architecture, trainer.moe)
        check_recomputed(architecture, recompute=trainer.activation_checkpointing)
    except UntrainableModel as refused:
        yield error("model", f"{refused.model} {refused.problem}", f"{refused.fix}.")
        return
    grid = grid_of(trainer)
    broken = list(broken_rules(architecture, grid, sequence_parallel=trainer.sequence_parallel))
    if broken:
        reasons = "; ".join(
            f"{each.setting}={each.got} is not {_alone(each.want)}" for each in broken
        )
        sizes = [f"{key} to {value}" for key, value in fitting_sizes(architecture, trainer).items()]
        yield error(_LAYOUT, reasons, f"Set {' and '.join(sizes)}: together they fit.")
        return
    dtype = config.model.dtype
    sharded = trainer.device != "cpu" and dtype != "float64"
    apart = trainer.encoder is not None  # then encoder ranks hold the tower, of which they say it
    held = largest_rank(
        replace(architecture, tower=()) if apart else architecture,
        grid,
        dtype,
        sharded=sharded,
        frozen=_frozen(config.model.path, trainer),
    )
    yield ok(
        _LAYOUT,
        f"{grid.ranks} ranks{' of the language model' if apart else ''}; the largest holds {size(held.total)}: weights {size(held.weights)}, "
        f"gradients {size(held.gradients)}, optimizer {size(held.optimizer)}; activations come on top",
    )


def _frozen(path: str, trainer: MegatronTrainerConfig) -> Collection[str]:
    """Return the weights that are not trained; none if ``check_model_proof`` refuses the patterns."""
    from offbeat.trainers.errors import UntrainableModel
    from offbeat.trainers.megatron.freezing import frozen_weights

    try:
        return frozen_weights(path, trainer.freeze).names
    except UntrainableModel:
        return ()


def _alone(want: str) -> str:
    """Return what a rule wants of a size, without what else might be set in its place."""
    return want.partition(", or ")[0].partition(": ")[0]

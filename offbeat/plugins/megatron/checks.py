"""Checks that the megatron trainer knows a model and can divide it, from its config alone.

It loads torch, whose import takes seconds: only recipes with a model import it.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

from offbeat.config.limits import encoder_of
from offbeat.config.run import RunConfig
from offbeat.launch.checks.gpu_memory import against_gpu, largest_rank_said
from offbeat.messages.finding import Finding, error
from offbeat.plugins.megatron.architecture import (
    Architecture,
    check_balanced,
    check_recomputed,
    read_architecture,
)
from offbeat.plugins.megatron.freezing import frozen_weights
from offbeat.plugins.megatron.layout import grid_of
from offbeat.plugins.megatron.layout_rules import broken_rules, fitting_sizes
from offbeat.plugins.megatron.rank_bytes import largest_rank
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.rank_bytes import RankBytes

_LAYOUT: Final = "layout"


def check_layout(config: RunConfig, gpu: int | None = None) -> Iterator[Finding]:
    """Check the parallel sizes of a megatron trainer, and compare what its largest rank holds with ``gpu``.

    Args:
        config: The recipe; nothing is said of one with another trainer.
        gpu: Memory of a rank's GPU in bytes; None: unknown, or the ranks are on the CPU.
    """
    trainer = config.trainer
    if not isinstance(trainer, MegatronTrainerConfig):
        return

    try:
        architecture = read_architecture(config.model.path)
        check_balanced(architecture, trainer.moe)
        check_recomputed(architecture, recompute=trainer.activation_checkpointing)
    except UntrainableModel as refused:
        yield error("model", f"{refused.subject} {refused.problem}", f"{refused.fix}.")
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
    apart = (
        encoder_of(trainer) is not None
    )  # then encoder ranks hold the tower, of which they say it
    held = held_by_megatron_rank(
        config, trainer, replace(architecture, tower=()) if apart else architecture
    )
    seen = (
        f"{grid.ranks} rank{'' if grid.ranks == 1 else 's'}{' of the language model' if apart else ''}; "
        f"{largest_rank_said(held)}; activations come on top"
    )
    axes = "trainer.tensor_parallel" + (", trainer.expert_parallel" if architecture.experts else "")
    shared = ", or trainer.data_parallel, whose ranks share the optimizer"
    shared = shared if _shares_optimizer(config, trainer) else ""
    less = f"Raise {axes} or trainer.pipeline_parallel{shared}"
    yield against_gpu(config, (_LAYOUT, seen), held.total, gpu, (less, "trainer.gpus"))


def held_by_megatron_rank(
    config: RunConfig, trainer: MegatronTrainerConfig, architecture: Architecture
) -> RankBytes:
    """Return the bytes of the rank that holds most of a recipe's model.

    Args:
        config: The recipe.
        trainer: Its trainer, whose sizes fit the model.
        architecture: What its ranks hold; without the tower where that has ranks of its own.
    """
    return largest_rank(
        architecture,
        grid_of(trainer),
        config.model.dtype,
        sharded=_shares_optimizer(config, trainer),
        frozen=_frozen(config.model.path, trainer),
    )


def _shares_optimizer(config: RunConfig, trainer: MegatronTrainerConfig) -> bool:
    return trainer.device != "cpu" and config.model.dtype != "float64"


def _frozen(path: str, trainer: MegatronTrainerConfig) -> Collection[str]:
    """Return the weights that are not trained; none if ``check_model_proof`` refuses the patterns."""
    try:
        return frozen_weights(path, trainer.freeze).names
    except UntrainableModel:
        return ()


def _alone(want: str) -> str:
    """Return what a rule wants of a size and why, without what else might be set in its place."""
    return want.partition(", or ")[0]

"""Estimates what a rank of a sweep point takes: bytes declared and activations counted, without processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from offbeat.config.limits import trainer_ranks
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.launch.checks.activations import estimated_activations
from offbeat.launch.checks.torch_ranks import held_by_torch_rank
from offbeat.messages.failures import OffbeatError
from offbeat.plugins.planning.fabricated import FabricatedGroup, LengthLaw, tokens_of
from offbeat.plugins.planning.sweep_task import fabricate_step, share_of_minibatches
from offbeat.trainers.ranks.dispatch import Replicas
from offbeat.trainers.trainer_plugin import find_trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of the rank that holds most, in MiB."""

    held_mib: float | None  # weights, gradients, optimizer; None: not known
    activations_mib: float | None  # of the largest microbatch; None: not known


NO_ESTIMATE: Final = MemoryEstimate(None, None)


def estimate(config: RunConfig, law: LengthLaw) -> MemoryEstimate:
    """Return the memory that a rank of a recipe's trainer should take, before one is started.

    Activations are known of one rank of the torch trainer, for what ``estimated_activations`` counts.
    Several ranks gather weights and divide matrices, which it does not count.

    Args:
        config: The recipe of the point, whose sizes fit the model.
        law: Lengths of its samples.
    """
    trainer = config.trainer
    try:
        if (plugin := find_trainer(trainer.backend)) is not None:
            of_plugin = plugin.held_by_rank(config)
            return (
                NO_ESTIMATE if of_plugin is None else MemoryEstimate(of_plugin.total / _MIB, None)
            )
        if not isinstance(trainer, TorchTrainerConfig):
            return NO_ESTIMATE
        from offbeat.models.loading import (  # noqa: PLC0415 -- it loads torch
            model_without_memory,
        )

        trust = config.model.trust_remote_code
        model = model_without_memory(Path(config.model.path), trust_remote_code=trust)
        counted = None
        if trainer_ranks(config) == 1:
            counted = estimated_activations(config, _largest_minibatch(config, law, model))
        held = held_by_torch_rank(config, trainer, model)
    except (OffbeatError, OSError, ValueError, KeyError):
        return NO_ESTIMATE  # the rank meets the same error, and says it
    return MemoryEstimate(held.total / _MIB, None if counted is None else counted[0] / _MIB)


def _largest_minibatch(
    config: RunConfig, law: LengthLaw, model: "PreTrainedModel"
) -> Sequence[FabricatedGroup]:
    """Return the groups of the minibatch with most tokens, as the one rank gets them."""
    from offbeat.trainers.torch.model import vocabulary  # noqa: PLC0415 -- it loads torch

    made = fabricate_step(law, config, vocabulary(model))
    assigned, minibatches = share_of_minibatches(made, config, Replicas.of(config.trainer), 0)
    parts = dict[int, list[FabricatedGroup]]()
    for at, minibatch in zip(assigned, minibatches, strict=True):
        parts.setdefault(minibatch, []).append(made[at])
    return max(parts.values(), key=lambda each: sum(map(tokens_of, each)))

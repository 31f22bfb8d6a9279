"""Weights of a vision tower that a recipe excludes from training by name (``trainer.freeze``).

A frozen weight has no gradient, no float32 master and no moments. It is in no gradient buffer of
the library and is summed over no ranks. Weights of the language model are always trained. Several
Hugging Face tensors share one parameter of megatron-core, and no part of a parameter can be frozen.
"""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from torch import nn
from transformers import PreTrainedModel

from offbeat.messages.text import list_names
from offbeat.models.loading import model_without_memory
from offbeat.models.media_rules import media_rules
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.sides import tower_modules
from offbeat.trainers.torch.model import frozen_parameters

_TORCH: Final = "set trainer.backend to torch"


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """Weights of a model that are not trained."""

    names: frozenset[str]  # in the model, tied ones once
    elements: int  # of all of them
    is_whole_tower: bool
    """Whether no weight of the vision tower is trained, so that its features need no gradient."""


NOTHING_FROZEN: Final = FrozenWeights(frozenset(), 0, is_whole_tower=False)


def frozen_weights(path: str | Path, patterns: Sequence[str]) -> FrozenWeights:
    """Return the weights of a directory's model that patterns exclude from training.

    Raises:
        UntrainableModel: ``frozen_in_tower`` refuses the patterns.
    """
    if not patterns:
        return NOTHING_FROZEN
    return frozen_in_tower(model_without_memory(path, trust_remote_code=False), patterns)


def frozen_in_tower(model: PreTrainedModel, patterns: Sequence[str]) -> FrozenWeights:
    """Return the weights of a model, which may be without memory, that a pattern matches.

    Raises:
        UntrainableModel: A pattern matches no name, or a name outside the vision tower.
    """
    towers = tower_modules(model) if media_rules(model.config).reads_media else []
    within = tuple(f"{each}." for each in towers)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in patterns:
        outside = [n for n in names if fnmatchcase(n, pattern) and not n.startswith(within)]
        if outside:
            raise _refusal(type(model).__name__, pattern, outside, within)
    frozen = set(frozen_parameters(model, patterns))
    trained = [n for n, each in model.named_parameters() if each not in frozen]
    return FrozenWeights(
        frozenset(name for name, each in model.named_parameters() if each in frozen),
        sum(each.numel() for each in frozen),
        is_whole_tower=not any(name.startswith(within) for name in trained),
    )


def freeze_weights(module: nn.Module, names: Collection[str]) -> None:
    """Exclude the parameters of a module that have these names from training."""
    for name, each in module.named_parameters():
        if name in names:
            each.requires_grad = False


def _refusal(
    model: str, pattern: str, outside: Sequence[str], within: Sequence[str]
) -> UntrainableModel:
    problem = (
        f"has {list_names(outside, 1)} in its language model, which {pattern!r} of trainer.freeze matches and "
        "the megatron trainer trains as a whole"
    )
    if not within:
        return UntrainableModel(model, problem, f"Leave the pattern out, or {_TORCH}")
    tower = " or ".join(within)
    fix = f"Match only names of its vision tower, which begin with {tower}, or {_TORCH}"
    return UntrainableModel(model, problem, fix)

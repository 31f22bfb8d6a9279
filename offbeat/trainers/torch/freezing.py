"""Parameters that a recipe excludes from training by name (``trainer.freeze``).

A frozen parameter has no gradient, so the optimizer has neither moments nor weight decay for it, and
FSDP2 keeps its shards in the dtype of the model.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from offbeat.trainers.errors import UntrainableModel


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Exclude all parameters from training that a pattern matches. The model may be without memory.

    Raises:
        UntrainableModel: ``frozen_parameters`` refuses the patterns.
    """
    for each in frozen_parameters(model, patterns):
        each.requires_grad = False


def frozen_parameters(model: PreTrainedModel, patterns: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters whose names in the model a pattern matches, tied ones once.

    Raises:
        UntrainableModel: A pattern matches no name, or some names of a tied parameter and not the
            others, or all parameters are matched.
    """
    names_by_parameter = dict[nn.Parameter, list[str]]()
    for name, each in model.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(each, []).append(name)
    kind, every = (
        type(model).__name__,
        [name for names in names_by_parameter.values() for name in names],
    )
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            nearest = _nearest(pattern, every)
            problem = f"has no parameter whose name matches {pattern!r} of trainer.freeze"
            fix = (
                f"The nearest name is {nearest}"
                if nearest
                else f"Names of this model begin with {', '.join(_beginnings(every))}"
            )
            raise UntrainableModel(kind, problem, fix)
    frozen = list[nn.Parameter]()
    for parameter, names in names_by_parameter.items():
        matched = [name for name in names if any(fnmatchcase(name, each) for each in patterns)]
        if matched and len(matched) < len(names):
            others = " and ".join(name for name in names if name not in matched)
            problem = (
                f"ties {' and '.join(matched)}, which trainer.freeze matches, to {others}, which "
                "it does not match"
            )
            raise UntrainableModel(
                kind, problem, "Match all of these names or none: they are one tensor"
            )
        frozen += [parameter] if matched else []
    if len(frozen) == len(names_by_parameter):
        problem = f"has no parameter to train: trainer.freeze matches all {len(frozen)}"
        raise UntrainableModel(kind, problem, "Leave a pattern out")
    return frozen


def _nearest(pattern: str, names: Sequence[str]) -> str | None:
    """Return the name whose first parts are close to those that a pattern spells out; None: no name is."""
    parts = pattern.removesuffix(".*").split(".")
    by_beginning = dict[str, str]()
    for name in names:
        by_beginning.setdefault(".".join(name.split(".")[: len(parts)]), name)
    nearest = get_close_matches(".".join(parts), by_beginning, n=1)
    return by_beginning[nearest[0]] if nearest else None


def _beginnings(names: Sequence[str]) -> list[str]:
    return sorted({name.partition(".")[0] for name in names})

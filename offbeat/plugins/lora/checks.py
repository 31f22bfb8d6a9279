"""Reports the size of adapters; warns of too high a rank and of weights without adapters.

It imports torch, which needs seconds, so only recipes with a model import it.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from torch import nn
from transformers import PreTrainedModel

from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.plugins.lora.lora import (
    check_targets,
    find_target_modules,
    find_unsupported_modules,
)
from offbeat.plugins.lora.section import LoraConfig
from offbeat.trainers.errors import UntrainableModel

_SUBJECT: Final = "adapters"
_EXPERTS: Final = ".experts."
_NAMED: Final = 3  # modules listed in a message


def check_adapters(model: PreTrainedModel, lora: LoraConfig) -> Iterator[Finding]:
    """Check the targets, the rank, and whether experts are left out.

    Args:
        model: The model, which may be without memory. It is not changed.
        lora: Section with the targets and the rank.
    """
    try:
        check_targets(model, lora)
    except UntrainableModel as refused:
        yield error(_SUBJECT, f"{refused.subject} {refused.problem}", f"{refused.fix}.")
        return
    targets = ", ".join(lora.target_modules) or "every linear module but the output head"
    count = adapter_parameters(model, lora)
    yield ok(
        _SUBJECT, f"rank {lora.rank}, alpha {lora.alpha:g}, on {targets}: {count:,} parameters"
    )
    targeted = find_target_modules(model, lora)
    yield from _rank_is_low(targeted, lora.rank)
    if not lora.target_modules:
        yield from _experts_are_left_out(model, targeted)
        yield from _modules_are_left_out(model)


def adapter_parameters(model: PreTrainedModel, lora: LoraConfig) -> int:
    """Return the number of elements of all adapters: ``rank * (in + out)`` per targeted matrix."""
    sides = find_target_modules(model, lora).values()
    return sum(lora.rank * (each.in_features + each.out_features) for each in sides)


def _rank_is_low(targeted: Mapping[str, nn.Linear], rank: int) -> Iterator[Finding]:
    ranks = {path: min(each.in_features, each.out_features) for path, each in targeted.items()}
    above = [path for path, most in ranks.items() if rank > most]
    if not above:
        return
    least = min(ranks.values())
    named = ", ".join(above[:_NAMED]) + (", ..." if len(above) > _NAMED else "")
    yield warning(
        _SUBJECT,
        f"trainer.lora.rank={rank} is more than the smaller axis of {len(above)} of "
        f"{len(ranks)} targeted matrices ({named}): a higher rank cannot change them further, "
        "and only costs memory",
        f"Set trainer.lora.rank to {least} or less.",
    )


def _experts_are_left_out(
    model: PreTrainedModel, adapted: Mapping[str, nn.Linear]
) -> Iterator[Finding]:
    """Warn of fused experts. They are not linear modules, so default targets miss them."""
    experts = sum(
        each.numel()
        for name, each in model.named_parameters()
        if _EXPERTS in name and name.rpartition(".")[0] not in adapted
    )
    if not experts:
        return
    weights = sum(each.weight.numel() for each in adapted.values())
    kinds = ", ".join(sorted({path.rpartition(".")[2] for path in adapted}))
    yield warning(
        _SUBJECT,
        f"matrices of {weights:,} weights are adapted ({kinds}), but {experts:,} weights of experts are "
        "not: experts in one tensor per layer, and their routers, are not linear modules",
        "Leave trainer.lora out to train the experts; name the modules in trainer.lora.target_modules to say "
        "that these are meant.",
    )


def _modules_are_left_out(model: PreTrainedModel) -> Iterator[Finding]:
    """Warn of linear modules that PEFT cannot adapt in the model's class."""
    left_out = find_unsupported_modules(model)
    if not left_out:
        return
    names = ", ".join(sorted({path.rpartition(".")[2] for path in left_out}))
    yield warning(
        _SUBJECT,
        f"{len(left_out)} linear modules ({names}) are not adapted, because PEFT cannot adapt them in a "
        f"{type(model).__name__}",
        "Leave trainer.lora out to train them; name the modules in trainer.lora.target_modules to say "
        "that these are meant.",
    )

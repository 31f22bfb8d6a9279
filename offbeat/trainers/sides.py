"""Divides an image-text model into two sides, and makes a model that holds only one of them."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves the parts of models untyped.

import enum
from collections.abc import Iterator
from typing import Final, NoReturn

from torch import nn
from transformers import PreTrainedModel

from offbeat.trainers.errors import AbsentModule, UntrainableModel
from offbeat.trainers.torch.forward import output_head

_FIX: Final = "Leave trainer.encoder out"


class Side(enum.StrEnum):
    """Part of an image-text model that a rank holds."""

    LANGUAGE = "language"  # decoder and output head
    TOWER = "tower"  # everything else: vision tower and projector


class HeldElsewhere(nn.Module):
    """Placeholder for a module held elsewhere. It has no weights, and raises when it is called."""

    def __init__(self, name: str, held: Side) -> None:
        super().__init__()
        self._name, self._held = name, held

    def forward(self, *_: object, **__: object) -> NoReturn:
        raise AbsentModule(self._name, self._held)


def tower_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the largest modules that contain no part of the decoder or output head.

    Raises:
        UntrainableModel: A tensor belongs neither to the decoder nor to the tower.
    """
    language = {id(model.get_decoder()), id(output_head(model))}

    def within(module: nn.Module, prefix: str) -> Iterator[str]:
        beside = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if beside:
            problem = f"holds {prefix}{beside[0][0]} in neither its decoder nor its vision tower"
            raise UntrainableModel(type(model).__name__, problem, _FIX)
        for name, child in module.named_children():
            if id(child) in language:
                continue
            if any(id(each) in language for each in child.modules()):
                yield from within(child, f"{prefix}{name}.")
            else:
                yield prefix + name

    return list(within(model, ""))


def keep_side(model: PreTrainedModel, side: Side) -> None:
    """Replace the modules of the other side, so that the model has only the weights of ``side``."""
    if side is Side.LANGUAGE:
        dropped = tower_modules(model)
    else:
        language = (model.get_decoder(), output_head(model))
        dropped = [name for name, each in model.named_modules() if any(each is m for m in language)]
    for name in dropped:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, HeldElsewhere(name, side))

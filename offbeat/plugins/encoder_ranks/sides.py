"""Assigns the tensors of an image-text model to the side that holds them."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves the parts of a model untyped.

import math
from dataclasses import dataclass
from typing import Final

import torch
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.models.media_passes import Features
from offbeat.models.media_rules import media_rules
from offbeat.trainers.errors import AbsentModule, UntrainableModel
from offbeat.trainers.sides import Side, tower_modules
from offbeat.trainers.torch.routing import find_routers
from offbeat.weight_sync.chunks import iterate_weights

_FIX = "Leave trainer.encoder out"
_COPIES: Final = 3  # copies per trained weight in a checkpoint: the weight and AdamW's moments
_FULL: Final = 4  # minimum bytes of a master weight's element


@dataclass(frozen=True, slots=True)
class Held:
    """Tensor of the whole model, and the side that holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    side: Side


@dataclass(frozen=True, slots=True)
class Inventory:
    """Tensors of a whole model, in its order."""

    weights: tuple[Held, ...]  # tied weights once
    buffers: tuple[Held, ...]
    trained: tuple[tuple[str, Side], ...]  # trained parameters
    parameters: int  # number of weights

    @property
    def state_nbytes(self) -> int:
        """Return the bytes of all weights. Trained ones have full precision and two moments."""
        trained = {name for name, _ in self.trained}

        def each_takes(held: Held) -> int:
            own = held.dtype.itemsize
            return _COPIES * max(_FULL, own) if held.name in trained else own

        return sum(math.prod(held.shape) * each_takes(held) for held in self.weights)

    def is_trained(self, side: Side) -> bool:
        """Return whether a parameter of a side is trained."""
        return any(each is side for _, each in self.trained)


def make_inventory(model: PreTrainedModel, *, has_experts: bool = False) -> Inventory:
    """Return the inventory of a whole model, with or without memory.

    Args:
        model: The model.
        has_experts: Whether it may have experts. The language ranks count the experts' load.

    Raises:
        UntrainableModel: The model has no separable tower, or both sides share a tensor.
    """
    kind = type(model).__name__
    if not media_rules(model.config).reads_media:
        raise UntrainableModel(kind, "reads no media, so that it has no tower to encode them", _FIX)
    if find_routers(model) and not has_experts:
        problem = "has experts, whose load the torch trainer counts over all ranks of one kind"
        raise UntrainableModel(kind, problem, f"{_FIX}, or set trainer.backend to megatron")
    towers = tower_modules(model)

    def find_side(name: str) -> Side:
        in_tower = any(name.startswith(f"{each}.") for each in towers)
        return Side.TOWER if in_tower else Side.LANGUAGE

    sides_of_weight = dict[int, set[Side]]()
    for name, each in model.named_parameters(remove_duplicate=False):
        sides_of_weight.setdefault(id(each), set()).add(find_side(name))
        if len(sides_of_weight[id(each)]) > 1:
            problem = f"ties {name} to a weight of its vision tower"
            raise UntrainableModel(kind, problem, _FIX)
    trained = [(name, find_side(name)) for name, p in model.named_parameters() if p.requires_grad]
    if trained and all(side is Side.TOWER for _, side in trained):
        problem = "trains nothing of its language model, which trainer.freeze matches as a whole"
        raise UntrainableModel(kind, problem, _FIX)
    return Inventory(
        tuple(
            Held(name, tuple(each.shape), each.dtype, find_side(name))
            for name, each in iterate_weights(model)
        ),
        tuple(
            Held(name, tuple(each.shape), each.dtype, find_side(name))
            for name, each in model.named_buffers()
        ),
        tuple(trained),
        sum(each.numel() for each in model.parameters()),
    )


def no_features(_: PreTrainedModel, __: tuple[Media, ...]) -> Features:
    """Refuse to compute features, for passes of a language rank that read no media."""
    raise AbsentModule("the vision tower", Side.LANGUAGE)

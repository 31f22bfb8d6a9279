"""Parts of an image-text model, read from its config: decoder, vision tower, positions of pictures."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from offbeat.multimodal.auto_class import auto_class_of
from offbeat.multimodal.picture_rules import PictureRules, picture_rules
from offbeat.weight_sync.reshard.region import Shape

IMAGE_TEXT_FAMILIES: Final = ("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl")
_AXES: Final = 3


@dataclass(frozen=True, slots=True)
class ImageTextParts:
    """Parts of an image-text model: the decoder by its name, and all that is not decoder or head."""

    decoder: str  # name of its module
    tower: tuple[tuple[str, Shape], ...]
    """Names in the model and shapes of the weights outside decoder and output head."""
    tied: bool  # whether the output head is the embedding
    rules: PictureRules
    axis_of_pair: tuple[int, ...] | None
    """Axis whose position turns each pair of a head's dimensions; None: positions have one axis."""


def why_unread(config: PreTrainedConfig) -> str:
    """Return why this backend does not train a model that reads pictures; empty if it does."""
    if config.model_type in IMAGE_TEXT_FAMILIES:
        return ""
    if config.model_type.startswith("qwen3_vl"):
        return "it adds features of pictures to what its first layers return"
    return f"of those, this backend trains {', '.join(IMAGE_TEXT_FAMILIES)}"


def image_text_parts(config: PreTrainedConfig) -> ImageTextParts:
    """Return the parts of a model of ``IMAGE_TEXT_FAMILIES``, which is made without memory."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class_of(config).from_config(config)
    decoder = decoder_name(model)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().get_parameter("weight")
    without_decoder(model)
    tower = tuple((name, tuple(each.shape)) for name, each in model.named_parameters())
    rules = picture_rules(config)
    assert head is not None  # noqa: S101 -- every such family has one
    assert rules is not None  # noqa: S101 -- as above
    text: Any = config.get_text_config(decoder=True)
    return ImageTextParts(
        decoder=decoder,
        tower=tower,
        tied=head.get_parameter("weight") is embedding,
        rules=rules,
        axis_of_pair=_axes(text.rope_parameters["mrope_section"]) if rules.has_axes else None,
    )


def decoder_name(model: PreTrainedModel) -> str:
    """Return the name of the module that is a model's decoder."""
    decoder = model.get_decoder()
    return next(name for name, each in model.named_modules() if each is decoder)


def without_decoder(model: PreTrainedModel) -> None:
    """Take decoder and output head out of a model: what is left is its tower."""
    head = model.get_output_embeddings()
    gone = [name for name, each in model.named_modules() if each is head]
    for name in (decoder_name(model), *gone):
        model.set_submodule(name, _Elsewhere(name))


class _Elsewhere(nn.Module):
    """Place of a module that megatron-core computes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._of = name

    def forward(self, *_: object, **__: object) -> None:
        raise AssertionError(f"{self._of} is computed by megatron-core, not by transformers")


def _axes(sections: list[int]) -> tuple[int, ...]:
    """Return the axis of each pair, from the number of neighbouring pairs of each axis."""
    return tuple(axis for axis in range(_AXES) for _ in range(sections[axis]))

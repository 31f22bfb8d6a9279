"""Parts of an image-text model, read from its config: decoder, vision tower, positions of pictures."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from offbeat.models.auto_class import auto_class_of
from offbeat.models.media_rules import MediaRules, media_rules
from offbeat.trainers.sides import Side, keep_side
from offbeat.weight_sync.region import Shape

IMAGE_TEXT_FAMILIES: Final = (
    "idefics3",
    "smolvlm",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
)
_INTERLEAVED: Final = ("qwen3_vl", "qwen3_vl_moe")  # the axes of neighbouring pairs take turns
_AXES: Final = 3


@dataclass(frozen=True, slots=True)
class ImageTextParts:
    """Parts of an image-text model: the decoder by its name, and all that is not decoder or head."""

    decoder: str  # name of its module
    tower: tuple[tuple[str, Shape], ...]
    """Names in the model and shapes of the weights outside decoder and output head."""
    tied: bool  # whether the output head is the embedding
    rules: MediaRules
    axis_of_pair: tuple[int, ...] | None
    """Axis whose position turns each pair of a head's dimensions; None: positions have one axis."""
    deep_layers: int
    """Number of first layers to whose outputs features of pictures are added."""


def image_text_parts(config: PreTrainedConfig) -> ImageTextParts:
    """Return the parts of a model of ``IMAGE_TEXT_FAMILIES``, which is made without memory."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class_of(config).from_config(config)
    decoder = decoder_name(model)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().get_parameter("weight")
    rules = media_rules(config)
    assert head is not None  # noqa: S101 -- every such family has one
    axes = (
        _axes(model, is_interleaved=config.model_type in _INTERLEAVED) if rules.has_axes else None
    )
    keep_side(model, Side.TOWER)
    tower = tuple((name, tuple(each.shape)) for name, each in model.named_parameters())
    return ImageTextParts(
        decoder=decoder,
        tower=tower,
        tied=head.get_parameter("weight") is embedding,
        rules=rules,
        axis_of_pair=axes,
        deep_layers=rules.deep_layers,
    )


def decoder_name(model: PreTrainedModel) -> str:
    """Return the name of the module that is a model's decoder."""
    decoder = model.get_decoder()
    return next(name for name, each in model.named_modules() if each is decoder)


def _axes(model: PreTrainedModel, *, is_interleaved: bool) -> tuple[int, ...]:
    """Return the axis of each pair of a head's dimensions of a model without memory."""
    rotary: Any = model.get_decoder().get_submodule("rotary_emb")
    sections: list[int] = rotary.mrope_section
    if not is_interleaved:
        return tuple(axis for axis in range(_AXES) for _ in range(sections[axis]))
    # An axis whose turns are used up leaves the rest to the first.
    turns = ((pair // _AXES, pair % _AXES) for pair in range(sum(sections)))
    return tuple(axis if turn < sections[axis] else 0 for turn, axis in turns)

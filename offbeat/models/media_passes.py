"""Features of media, written into a forward pass at the placeholders of its prompts.

Legend: K placeholders, F features over all media, H hidden.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers declare some functions without types.

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.models.media_placing import PlacedMedia
from offbeat.models.media_rules import MediaRules


class FeaturesMismatch(RuntimeError):
    """An encoder returned a different number of features than its config requires."""

    def __init__(self, model: str, features: int, wanted: int) -> None:
        super().__init__(model, features, wanted)
        self.model, self.features, self.wanted = model, features, wanted

    def __str__(self) -> str:
        return (
            f"{self.model} made {self.features} features of media for {self.wanted} tokens. Use "
            "processor and model configs of one model"
        )


class Features(NamedTuple):
    """Features of media."""

    embedded_FH: Tensor  # replaces the embeddings of their tokens
    deep: tuple[Tensor, ...]  # [F, H] each: added to the outputs of the first decoder layers


FeaturesOf = Callable[[PreTrainedModel, tuple[Media, ...]], Features]
"""(model, media) -> features of the media, in their order."""


@contextmanager
def write_media(
    model: PreTrainedModel,
    rules: MediaRules,
    placed: PlacedMedia | None,
    features_of: FeaturesOf | None = None,
) -> Generator[None]:
    """Write features of media into the embeddings of the one forward pass inside the block.

    Hooks on the input embedding do this while the model's forward runs, because the weights of a
    sharded model exist only then. They call ``features_of``, or the model's own encoder if that is
    None. Without media, no hook is set.
    """
    if placed is None:
        yield
        return
    wanted = sum(map(rules.count_features, placed.media))
    places_K, sources_K = (
        torch.from_numpy(each).to(model.device, non_blocking=True)
        for each in (placed.places_K, placed.sources_K)
    )
    handles = list[RemovableHandle]()

    def write(_: nn.Module, __: tuple[Tensor], embedded: Tensor) -> Tensor:
        made = (features_of or rules.encode)(model, placed.media)
        if len(made.embedded_FH) != wanted:
            raise FeaturesMismatch(type(model).__name__, len(made.embedded_FH), wanted)
        for layer, deep_FH in zip(_decoder_layers(model), made.deep, strict=False):
            handles.append(layer.register_forward_hook(partial(add, deep_FH)))
        flat = embedded.reshape(-1, embedded.shape[-1])
        at_places_KH = made.embedded_FH.to(flat.dtype).index_select(0, sources_K)
        return flat.index_copy(0, places_K, at_places_KH).view_as(embedded)

    def add(deep_FH: Tensor, _: nn.Module, __: tuple[Tensor], hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        at_places_KH = deep_FH.to(flat.dtype).index_select(0, sources_K)
        return flat.index_add(0, places_K, at_places_KH).view_as(hidden)

    handles.append(model.get_input_embeddings().register_forward_hook(write))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def media_arguments(
    model: PreTrainedModel,
    placed: PlacedMedia | None,
    visible: Callable[[], NDArray[np.bool_]],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the arguments of a forward pass that depend on its media.

    Args:
        model: The model.
        placed: The media in the rows of the pass.
        visible: Computes the attention mask [R, T, T] of the rows without media.
        dtype: Dtype of the model's computation.
    """
    arguments = dict[str, Any]()
    if placed is not None and placed.axes_3RT is not None:
        axes_3RT = torch.from_numpy(placed.axes_3RT)
        arguments["position_ids"] = axes_3RT.to(model.device, non_blocking=True)
    if placed is not None and placed.blocks_K is not None:
        seen_RTT = torch.from_numpy(placed.opened(visible())).to(model.device)
        arguments["attention_mask"] = masks_by_kind(model, seen_RTT, dtype)
    return arguments


def additive_mask(seen_RTT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask [R, 1, T, T] to add to scores: 0 where ``seen_RTT``, else the minimum."""
    mask_RTT = torch.zeros(seen_RTT.shape, dtype=dtype, device=seen_RTT.device)
    return mask_RTT.masked_fill_(~seen_RTT, torch.finfo(dtype).min)[:, None]


def masks_by_kind(model: PreTrainedModel, seen_RTT: Tensor, dtype: torch.dtype) -> Any:  # noqa: ANN401 -- a tensor, or one per kind of layer
    """Return ``additive_mask``, or one per kind of layer if the model declares kinds."""
    mask = additive_mask(seen_RTT, dtype)
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return dict.fromkeys(kinds, mask) if kinds else mask


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    layers = model.get_decoder().get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)  # noqa: S101 -- in every family with such features
    return layers

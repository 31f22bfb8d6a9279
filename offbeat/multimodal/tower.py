"""Features of pictures, written into a forward pass at the placeholders of its prompts.

Legend: K placeholders, F features over all pictures, H hidden.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers declare some functions without types.

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from offbeat.messages.media import Media, MediaKind
from offbeat.multimodal.picture_rules import PictureRules, picture_rules
from offbeat.multimodal.placing import PlacedPictures


class FeaturesMismatch(RuntimeError):
    """A vision tower made another number of features than its config says."""

    def __init__(self, model: str, features: int, wanted: int) -> None:
        super().__init__(model, features, wanted)
        self.model, self.features, self.wanted = model, features, wanted

    def __str__(self) -> str:
        return (
            f"{self.model} made {self.features} features of pictures that take {self.wanted} tokens. "
            "Make the processor's and the model's config of one model agree"
        )


class Features(NamedTuple):
    """Features of pictures."""

    embedded_FH: Tensor  # in the place of the embeddings of their tokens
    deep: tuple[Tensor, ...]  # [F, H] each: added to what the first decoder layers return


FeaturesOf = Callable[[PreTrainedModel, tuple[Media, ...]], Features]
"""(model, pictures) -> their features, in the order of the pictures."""


def features(model: PreTrainedModel, media: tuple[Media, ...]) -> Features:
    """Compute the features of pictures; with a gradient if a weight of the tower is trained."""
    body: Any = model
    output = body.get_image_features(**picture_inputs(model, media), return_dict=True)
    deep = getattr(output, "deepstack_features", None) or ()  # of Qwen3-VL alone
    return Features(_joined(output.pooler_output), tuple(map(_joined, deep)))


@contextmanager
def pictures_in(
    model: PreTrainedModel,
    rules: PictureRules | None,
    pictures: PlacedPictures | None,
    features_of: FeaturesOf = features,
) -> Generator[None]:
    """Write features of pictures into the embeddings of the one forward pass inside the block.

    Hooks of the input embedding do so while the model's forward runs, because the weights of a
    sharded model exist only then; ``features_of`` is called there. Without pictures there is no hook.
    """
    if pictures is None or rules is None:
        yield
        return
    wanted = sum(map(rules.features, pictures.media))
    places_K, sources_K = (
        torch.from_numpy(each).to(model.device, non_blocking=True)
        for each in (pictures.places_K, pictures.sources_K)
    )
    handles = list[RemovableHandle]()

    def write(_: nn.Module, __: tuple[Tensor], embedded: Tensor) -> Tensor:
        made = features_of(model, pictures.media)
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


def picture_inputs(model: PreTrainedModel, media: Sequence[Media]) -> dict[str, Tensor]:
    """Return the arguments by which transformers' own forward pass takes these pictures."""
    values = torch.from_numpy(np.concatenate([each.values for each in media]))
    values = values.to(model.device, model.dtype)
    sizes = np.concatenate([each.sizes for each in media])
    if media[0].kind is MediaKind.PATCHES:
        patches = values.view(int(sizes.astype(np.int64).prod(1).sum()), -1)
        grids = torch.from_numpy(sizes.astype(np.int64)).to(model.device)
        return {"pixel_values": patches, "image_grid_thw": grids}
    pixels = values.view(len(sizes), *sizes[0].tolist())
    rules = picture_rules(model.config)
    is_flat = rules is not None and rules.opens_attention
    return {"pixel_values": pixels if is_flat else pixels[None]}


def token_kinds(model: PreTrainedModel, ids_RT: Tensor) -> dict[str, Tensor]:
    """Return the argument that marks the tokens of pictures [R, T] in transformers' own pass."""
    rules = picture_rules(model.config)
    if rules is None or not (rules.has_axes or rules.opens_attention):
        return {}
    name = "mm_token_type_ids" if rules.has_axes else "token_type_ids"
    return {name: (ids_RT == rules.placeholder).int()}


def additive_mask(seen_RTT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask [R, 1, T, T] to add to attention scores: 0 where ``seen_RTT``, else the least."""
    mask_RTT = torch.zeros(seen_RTT.shape, dtype=dtype, device=seen_RTT.device)
    return mask_RTT.masked_fill_(~seen_RTT, torch.finfo(dtype).min)[:, None]


def masks_by_kind(model: PreTrainedModel, seen_RTT: Tensor, dtype: torch.dtype) -> Any:  # noqa: ANN401 -- a tensor, or one per kind of layer
    """Return ``additive_mask`` as a model takes it: where its layers are of several kinds, for each."""
    mask = additive_mask(seen_RTT, dtype)
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return dict.fromkeys(kinds, mask) if kinds else mask


def _joined(made: Tensor | Sequence[Tensor]) -> Tensor:
    """Return features [F, H] that a tower makes per picture."""
    whole = made if isinstance(made, Tensor) else torch.cat(list(made))
    return whole.reshape(-1, whole.shape[-1])


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    layers = model.get_decoder().get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)  # noqa: S101 -- of every family with such features
    return layers

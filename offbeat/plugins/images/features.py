"""Computes the features of pictures with a vision tower of transformers.

Legend: F features over all pictures, H hidden.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers declare some functions without types.

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.models.media_passes import Features
from offbeat.plugins.images.pictures import MediaKind, Pictures


def tower_features(model: PreTrainedModel, media: Media, *, is_flat: bool) -> Features:
    """Compute the features of pictures, with a gradient if a weight of the tower is trained.

    ``is_flat``: as in ``picture_inputs``.
    """
    body: Any = model
    inputs = picture_inputs(model, media, is_flat=is_flat)
    output = body.get_image_features(**inputs, return_dict=True)
    deep = getattr(output, "deepstack_features", None) or ()  # only Qwen3-VL has them
    return Features(_join(output.pooler_output), tuple(map(_join, deep)))


def picture_inputs(model: PreTrainedModel, media: Media, *, is_flat: bool) -> dict[str, Tensor]:
    """Return the picture arguments of transformers' own forward pass.

    ``is_flat``: whether pixels have no axis of prompts.
    """
    pictures = Pictures.of(media)
    values = torch.tensor(pictures.values).to(model.device, model.dtype)
    sizes = pictures.sizes
    if pictures.kind is MediaKind.PATCHES:
        patches = values.view(int(sizes.astype(np.int64).prod(1).sum()), -1)
        grids = torch.from_numpy(sizes.astype(np.int64)).to(model.device)
        return {"pixel_values": patches, "image_grid_thw": grids}
    pixels = values.view(len(sizes), *sizes[0].tolist())
    return {"pixel_values": pixels if is_flat else pixels[None]}


def _join(made: Tensor | Sequence[Tensor]) -> Tensor:
    """Join the features that a tower returns per picture, [F, H]."""
    whole = made if isinstance(made, Tensor) else torch.cat(list(made))
    return whole.reshape(-1, whole.shape[-1])

"""Features of pictures, written into a forward pass at the placeholders of its prompts.

Legend: K placeholders, F features over all pictures, H hidden.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers declare some functions without types.

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.multimodal.picture_rules import PictureRules, PlacedPictures


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


@contextmanager
def pictures_in(
    model: PreTrainedModel, rules: PictureRules | None, pictures: PlacedPictures | None
) -> Generator[None]:
    """Write features of pictures into the embeddings of the one forward pass inside the block.

    Hooks of the input embedding do so while the model's forward runs, because the weights of a
    sharded model exist only then. Without pictures there is no hook.
    """
    if pictures is None or rules is None:
        yield
        return
    wanted = sum(map(rules.features, pictures.media))

    def write(_: nn.Module, __: tuple[Tensor], embedded: Tensor) -> Tensor:
        features_FH = features(model, pictures.media)
        if len(features_FH) != wanted:
            raise FeaturesMismatch(type(model).__name__, len(features_FH), wanted)
        places_K, sources_K = (
            torch.from_numpy(each).to(embedded.device, non_blocking=True)
            for each in (pictures.places_K, pictures.sources_K)
        )
        flat = embedded.reshape(-1, embedded.shape[-1])
        at_places_KH = features_FH.to(flat.dtype).index_select(0, sources_K)
        return flat.index_copy(0, places_K, at_places_KH).view_as(embedded)

    handle = model.get_input_embeddings().register_forward_hook(write)
    try:
        yield
    finally:
        handle.remove()


def features(model: PreTrainedModel, media: tuple[Media, ...]) -> Tensor:
    """Compute the features [F, H] of pictures; with a gradient if a weight of the tower is trained."""
    body: Any = model
    output = body.get_image_features(**picture_inputs(model, media), return_dict=True)
    made = cast("Tensor", output.pooler_output)
    return made.reshape(-1, made.shape[-1])


def picture_inputs(model: PreTrainedModel, media: Sequence[Media]) -> dict[str, Tensor]:
    """Return the arguments by which transformers' own forward pass takes these pictures."""
    values = torch.from_numpy(np.concatenate([each.values for each in media]))
    sizes = np.concatenate([each.sizes for each in media])
    channels, height, width = sizes[0].tolist()
    pixels = values.view(1, len(sizes), channels, height, width)
    return {"pixel_values": pixels.to(model.device, model.dtype)}

"""Converts prompts, with pictures or without, to vLLM's inputs. Depends on the option ``images``.

vLLM usually gets a picture file and one placeholder token, runs the image processor itself and expands
the placeholder. A request has both done: the values go to the model as they are, so that engine and
trainer compute from the same numbers, and the token ids stay those of the group.

Legend: I pictures, C channels, H height, W width, K placeholder tokens of a picture.
"""

# pyright: basic
# vLLM may not be installed.

import hashlib
from collections.abc import Sequence
from typing import Any

from offbeat.messages.media import Media
from offbeat.models.media_rules import MediaRules
from offbeat.plugins.images.pictures import Pictures
from offbeat.plugins.vllm.lazy_import import Library

_MODALITY = "image"


class PromptInputs:
    """Makes the inputs of one engine."""

    def __init__(self, library: Library, rules: MediaRules) -> None:
        """``rules`` are the media rules of the served model."""
        self._vllm, self._rules = library, rules

    def of(self, prompt_ids: Sequence[int], media: Media | None, salt: str) -> Any:  # noqa: ANN401
        """Return the input of a prompt.

        Args:
            prompt_ids: Token ids, with the placeholder tokens of each picture.
            media: The pictures, checked against the rules of the model.
            salt: What is cached of the prompt, is read by prompts of the same salt alone.
        """
        ids = list(prompt_ids)
        if media is None:
            return self._vllm.TokensPrompt(prompt_token_ids=ids, cache_salt=salt)
        return self._vllm.mm_input(
            ids,
            self._values(Pictures.of(media)),
            {_MODALITY: _names(Pictures.of(media), salt)},
            {_MODALITY: self._ranges(ids, media)},
            cache_salt=salt,
        )

    def _values(self, pictures: Pictures) -> Any:  # noqa: ANN401
        """Return the arguments of the model's tower: each picture is an item of one tile."""
        # torch and transformers, which a process with a handle of the actor need not load.
        import torch
        from transformers import BatchFeature

        count = len(pictures.sizes)
        each = torch.ones(count, dtype=torch.long)
        pixels_ICHW = torch.tensor(pictures.values).reshape(count, *pictures.sizes[0].tolist())
        of_tiles = self._vllm.MultiModalFieldConfig.flat_from_sizes(_MODALITY, each)
        tower = {
            "pixel_values": pixels_ICHW,
            "pixel_attention_mask": torch.ones_like(pixels_ICHW[:, 0], dtype=torch.bool),
            "num_patches": each,
        }
        fields = {
            "pixel_values": of_tiles,
            "pixel_attention_mask": of_tiles,
            "num_patches": self._vllm.MultiModalFieldConfig.batched(_MODALITY, keep_on_cpu=True),
        }
        return self._vllm.MultiModalKwargsItems.from_hf_inputs(BatchFeature(tower), fields)

    def _ranges(self, ids: list[int], media: Media) -> list[Any]:
        """Return where the features of each picture go; a gap in its placeholders stays as it is."""
        import torch

        ranges = list[Any]()
        for places_K in self._rules.places(ids, media).reshape(len(Pictures.of(media).sizes), -1):
            taken = torch.zeros(int(places_K[-1] - places_K[0]) + 1, dtype=torch.bool)
            taken[torch.from_numpy(places_K - places_K[0])] = True
            ranges.append(self._vllm.PlaceholderRange(int(places_K[0]), len(taken), taken))
        return ranges


def _names(pictures: Pictures, salt: str) -> list[str]:
    """Return the names under which vLLM keeps the features of each picture.

    They have the salt: features of older weights are never read.
    """
    rows = pictures.values.reshape(len(pictures.sizes), -1)
    digests = [hashlib.blake2b(each.tobytes(), digest_size=16).hexdigest() for each in rows]
    return [f"{salt}.{digest}" for digest in digests]

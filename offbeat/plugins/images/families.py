"""Rules of each model family for the pictures of a prompt. Numpy only.

Legend: I pictures, P prompt tokens, K placeholder tokens of the prompt.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

import numpy as np

from offbeat.messages.media import Media
from offbeat.models.media_rules import Ints, MediaRules, Tokens
from offbeat.plugins.images.pictures import MediaKind, Pictures, merge

_VALUE_BYTES: Final = 4  # float32
_PIXELS: Final = ("idefics3", "smolvlm")
_OPENED: Final = ("gemma3",)
_PATCHES: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
FAMILIES: Final = (*_PIXELS, *_PATCHES, *_OPENED)
"""``model_type`` of each family whose pictures the trainer and embedded engine can compute."""

READ_FAMILIES: Final = tuple(family for family in FAMILIES if family != "smolvlm")
"""Families that also have a processor in workers. SmolVLM2's processor needs video packages."""


@dataclass(frozen=True, slots=True)
class PictureRules(MediaRules):
    """Rules of a model that reads pictures."""

    _: KW_ONLY
    noun: str = "pictures"
    reads_media: bool = True
    kind: MediaKind

    @abstractmethod
    def _features(self, pictures: Pictures) -> int: ...

    @abstractmethod
    def _problem_of_sizes(self, pictures: Pictures) -> str: ...

    def count_features(self, media: Media) -> int:
        return self._features(Pictures.of(media))

    def merge(self, media: Sequence[Media]) -> Media:
        return merge(media)

    def cut(self, media: Media, max_tokens: int) -> list[Media]:
        pictures = Pictures.of(media)
        if self._features(pictures) <= max_tokens:
            return [media]
        parts, first, count = list[Media](), 0, len(pictures.sizes)
        for end in range(1, count + 1):
            if end == count or self._features(pictures.between(first, end + 1)) > max_tokens:
                parts.append(pictures.between(first, end).media)
                first = end
        return parts

    def encode(self, model: Any, media: Sequence[Media]) -> Any:  # noqa: ANN401 -- torch is not loaded here
        from offbeat.plugins.images.features import tower_features  # noqa: PLC0415 -- loads torch

        return tower_features(model, merge(media), is_flat=self.opens_attention)

    def plain_inputs(self, model: Any, media: Media, ids_RT: Any) -> dict[str, Any]:  # noqa: ANN401 -- as above
        from offbeat.plugins.images.features import picture_inputs  # noqa: PLC0415 -- loads torch

        inputs = picture_inputs(model, media, is_flat=self.opens_attention)
        if self.has_axes or self.opens_attention:
            name = "mm_token_type_ids" if self.has_axes else "token_type_ids"
            inputs[name] = (ids_RT == self.placeholder).int()
        return inputs

    def layout_problem(self, media: Media) -> str:
        """Return the problem with a picture that the model cannot read, or an empty string.

        Raises:
            SchemaError: As ``Pictures.of``.
        """
        pictures = Pictures.of(media)
        if pictures.kind is not self.kind:
            return f"has pictures as {pictures.kind.value}, but the model reads {self.kind.value}"
        return self._problem_of_sizes(pictures)


@dataclass(frozen=True, slots=True)
class PixelRules(PictureRules):
    """Rules of a model that reads pictures of one size."""

    size: tuple[int, int, int]  # channels, height and width of every picture
    tokens: int  # per picture
    _: KW_ONLY
    kind: MediaKind = MediaKind.PIXELS

    def _features(self, pictures: Pictures) -> int:
        return len(pictures.sizes) * self.tokens

    def max_features(self, nbytes: int) -> int:
        return nbytes // (math.prod(self.size) * _VALUE_BYTES) * self.tokens

    def example(self, rng: np.random.Generator) -> Media:
        values = rng.standard_normal(int(np.prod(self.size)), np.float32)
        return Pictures(self.kind, values, np.array([self.size], np.int32)).media

    def _problem_of_sizes(self, pictures: Pictures) -> str:
        for index, size in enumerate(pictures.sizes.tolist()):
            if tuple(size) != self.size:
                return f"has a picture {index} of {size}, but the model reads {list(self.size)}"
        blank = np.flatnonzero(~pictures.values.reshape(len(pictures.sizes), -1).any(1))
        if len(blank):
            return f"has a picture {blank[0]} of zeros, which the model reads as padding"
        return ""


@dataclass(frozen=True, slots=True)
class PatchRules(PictureRules):
    """Rules of a model that reads pictures of any size as patches, with positions on three axes."""

    patch_values: int
    merged: int  # patches along each side of one token
    _: KW_ONLY
    kind: MediaKind = MediaKind.PATCHES
    has_axes: bool = True

    def _features(self, pictures: Pictures) -> int:
        return int(pictures.sizes.astype(np.int64).prod(1).sum()) // self.merged**2

    def max_features(self, nbytes: int) -> int:
        return nbytes // (self.patch_values * _VALUE_BYTES) // self.merged**2

    def example(self, rng: np.random.Generator) -> Media:
        grid = np.array([[1, 2 * self.merged, 3 * self.merged]], np.int32)
        values = rng.standard_normal(int(grid.prod()) * self.patch_values, np.float32)
        return Pictures(self.kind, values, grid).media

    def shift(self, media: Media | None) -> int:
        """Return the shift, given that a picture uses one position per token of its longer side."""
        if media is None:
            return 0
        pictures = Pictures.of(media)
        longer = pictures.sizes[:, 1:].max(1) // self.merged
        return int(longer.sum()) - self._features(pictures)

    def axes(self, prompt_ids: Tokens, media: Media | None) -> Ints:
        """Return positions. A picture's positions count rows and columns from its start."""
        if media is None:
            return np.tile(np.arange(len(prompt_ids)), (3, 1))
        steps = np.ones(len(prompt_ids), np.int64)  # shift that each token adds to later tokens
        grids, firsts, places = list[Ints](), list[int](), self.places(prompt_ids, media)
        count = 0
        for frames, height, width in Pictures.of(media).sizes.tolist():
            shape = (frames, height // self.merged, width // self.merged)
            grids.append(np.indices(shape).reshape(3, -1))
            own = places[count : count + grids[-1].shape[1]]
            count += len(own)
            steps[own] = 0
            steps[own[-1]] = max(shape[1:])
            firsts += [own[0]] * len(own)
        before = np.cumsum(steps) - steps
        axes = np.tile(before, (3, 1))
        axes[:, places] = before[firsts] + np.concatenate(grids, 1)
        return axes

    def _problem_of_sizes(self, pictures: Pictures) -> str:
        for index, (frames, height, width) in enumerate(pictures.sizes.tolist()):
            if frames != 1 or height % self.merged or width % self.merged:
                want = f"one frame, and sides of multiples of {self.merged}"
                return f"has a picture {index} of {[frames, height, width]}, but the model reads {want}"
        count = int(pictures.sizes.astype(np.int64).prod(1).sum())
        if len(pictures.values) != self.patch_values * count:
            return f"has patches that are not of {self.patch_values} values, as the model reads"
        return ""


def rules_of_config(config: Any) -> PictureRules | None:  # noqa: ANN401 -- transformers' config, which it does not type
    """Return a model's rules by its config, or None if its pictures are not supported."""
    if config.model_type in _PIXELS:
        vision = config.vision_config
        side, patches = vision.image_size, vision.image_size // vision.patch_size
        size = (vision.num_channels, side, side)
        return PixelRules(config.image_token_id, size, patches**2 // config.scale_factor**2)
    if config.model_type in _OPENED:
        vision = config.vision_config
        size = (vision.num_channels, vision.image_size, vision.image_size)
        return PixelRules(
            config.image_token_id, size, config.mm_tokens_per_image, opens_attention=True
        )
    if config.model_type in _PATCHES:
        vision = config.vision_config
        channels: int = getattr(vision, "in_channels", 0) or vision.in_chans
        values = channels * vision.temporal_patch_size * vision.patch_size**2
        deep = len(getattr(vision, "deepstack_visual_indexes", ()))  # only Qwen3-VL has it
        merged = vision.spatial_merge_size
        return PatchRules(config.image_token_id, values, merged, deep_layers=deep)
    return None

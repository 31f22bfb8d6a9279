"""Rules of a family of models for the pictures of a prompt. Numpy only.

Legend: I pictures, P prompt tokens, K placeholder tokens of the prompt.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.media import Media, MediaKind

Ints = NDArray[np.int64]
Tokens = Sequence[int] | NDArray[np.generic]

_VALUE_BYTES: Final = 4  # float32
_PIXELS: Final = ("idefics3", "smolvlm")
_OPENED: Final = ("gemma3",)
_PATCHES: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
FAMILIES: Final = (*_PIXELS, *_PATCHES, *_OPENED)
"""Values of ``model_type`` of the families whose pictures trainer and embedded engine compute."""

READ_FAMILIES: Final = tuple(family for family in FAMILIES if family != "smolvlm")
"""Families that workers have a processor for as well: that of SmolVLM2 needs packages for videos."""


@dataclass(frozen=True, slots=True)
class PictureRules(ABC):
    """Layout of the pictures that a model reads, and the tokens that they take in a prompt."""

    placeholder: int  # token id

    @property
    @abstractmethod
    def kind(self) -> MediaKind: ...

    @property
    def has_axes(self) -> bool:
        """Return whether a token of a picture has a position on each of three axes."""
        return False

    @property
    def opens_attention(self) -> bool:
        """Return whether the tokens of a picture attend to each other both ways."""
        return False

    @abstractmethod
    def features(self, media: Media) -> int:
        """Return the number of features that the tower makes of pictures: placeholders they need."""

    @abstractmethod
    def most_features(self, nbytes: int) -> int:
        """Return the most features of pictures whose values take so many bytes."""

    @abstractmethod
    def example(self, rng: np.random.Generator) -> Media:
        """Return one picture of random values that the model reads."""

    @abstractmethod
    def _problem_of_sizes(self, media: Media) -> str:
        """Return which picture has a size that the model does not read; empty if none."""

    def problem(self, prompt_ids: Tokens, media: Media, *, is_history: bool) -> str:
        """Return why a prompt with these pictures cannot be computed; empty if it can.

        Args:
            prompt_ids: Token ids of the prompt.
            media: Its pictures.
            is_history: Sampled tokens may follow the prompt, placeholder ids among them.
        """
        if media.kind is not self.kind:
            return f"has pictures as {media.kind.value}, and the model reads {self.kind.value}"
        if problem := self._problem_of_sizes(media):
            return problem
        features, placeholders = self.features(media), self._placeholders(prompt_ids)
        if len(placeholders) < features or (len(placeholders) > features and not is_history):
            return f"has {len(placeholders)} placeholder tokens, and its pictures take {features}"
        return ""

    def places(self, prompt_ids: Tokens, media: Media) -> Ints:
        """Return the indices [K] of the tokens of the pictures of a prompt.

        Placeholder ids behind the last of them were sampled, and are ordinary tokens.
        """
        return self._placeholders(prompt_ids)[: self.features(media)]

    def shift(self, media: Media | None) -> int:
        """Return what is added to the positions of all tokens behind a prompt with these pictures."""
        del media
        return 0

    def axes(self, prompt_ids: Tokens, media: Media | None) -> Ints:
        """Return the positions [3, P] of a prompt's tokens on three axes."""
        del media
        return np.tile(np.arange(len(prompt_ids)), (3, 1))

    def _placeholders(self, prompt_ids: Tokens) -> Ints:
        return np.flatnonzero(np.asarray(prompt_ids) == self.placeholder)


@dataclass(frozen=True, slots=True)
class PixelRules(PictureRules):
    """Rules of a model that reads pictures of one size."""

    size: tuple[int, int, int]  # channels, height and width of every picture
    tokens: int  # of one picture
    is_opened: bool = False  # its tokens attend to each other both ways

    @property
    def kind(self) -> MediaKind:
        return MediaKind.PIXELS

    @property
    def opens_attention(self) -> bool:
        return self.is_opened

    def features(self, media: Media) -> int:
        return len(media.sizes) * self.tokens

    def most_features(self, nbytes: int) -> int:
        return nbytes // (math.prod(self.size) * _VALUE_BYTES) * self.tokens

    def example(self, rng: np.random.Generator) -> Media:
        values = rng.standard_normal(int(np.prod(self.size)), np.float32)
        return Media(self.kind, values, np.array([self.size], np.int32))

    def _problem_of_sizes(self, media: Media) -> str:
        for index, size in enumerate(media.sizes.tolist()):
            if tuple(size) != self.size:
                return f"has a picture {index} of {size}, and the model reads {list(self.size)}"
        blank = np.flatnonzero(~media.values.reshape(len(media.sizes), -1).any(1))
        if len(blank):
            return f"has a picture {blank[0]} of zeros, which the model takes for padding"
        return ""


@dataclass(frozen=True, slots=True)
class PatchRules(PictureRules):
    """Rules of a model that reads pictures of any size as patches, with positions on three axes."""

    patch_values: int
    merge: int  # patches along each side that one token stands for

    @property
    def kind(self) -> MediaKind:
        return MediaKind.PATCHES

    @property
    def has_axes(self) -> bool:
        return True

    def features(self, media: Media) -> int:
        return int(media.sizes.astype(np.int64).prod(1).sum()) // self.merge**2

    def most_features(self, nbytes: int) -> int:
        return nbytes // (self.patch_values * _VALUE_BYTES) // self.merge**2

    def example(self, rng: np.random.Generator) -> Media:
        grid = np.array([[1, 2 * self.merge, 3 * self.merge]], np.int32)
        values = rng.standard_normal(int(grid.prod()) * self.patch_values, np.float32)
        return Media(self.kind, values, grid)

    def shift(self, media: Media | None) -> int:
        """Return it: a picture takes as many positions as its longer side has tokens."""
        if media is None:
            return 0
        longer = media.sizes[:, 1:].max(1) // self.merge
        return int(longer.sum()) - self.features(media)

    def axes(self, prompt_ids: Tokens, media: Media | None) -> Ints:
        """Return positions of which a picture's count its rows and columns from where it begins."""
        if media is None:
            return np.tile(np.arange(len(prompt_ids)), (3, 1))
        steps = np.ones(len(prompt_ids), np.int64)  # by which each token moves those behind it on
        grids, firsts, places = list[Ints](), list[int](), self.places(prompt_ids, media)
        count = 0
        for frames, height, width in media.sizes.tolist():
            shape = (frames, height // self.merge, width // self.merge)
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

    def _problem_of_sizes(self, media: Media) -> str:
        for index, (frames, height, width) in enumerate(media.sizes.tolist()):
            if frames != 1 or height % self.merge or width % self.merge:
                want = f"one frame, and sides of multiples of {self.merge}"
                return f"has a picture {index} of {[frames, height, width]}; the model reads {want}"
        if len(media.values) != self.patch_values * int(media.sizes.astype(np.int64).prod(1).sum()):
            return f"has patches that are not of {self.patch_values} values, as the model reads"
        return ""


def picture_rules(config: Any) -> PictureRules | None:  # noqa: ANN401 -- transformers' config, which it does not type
    """Return the rules of a model by its config; None for one whose pictures are not supported."""
    if config.model_type in _PIXELS:
        vision = config.vision_config
        side, patches = vision.image_size, vision.image_size // vision.patch_size
        size = (vision.num_channels, side, side)
        return PixelRules(config.image_token_id, size, patches**2 // config.scale_factor**2)
    if config.model_type in _OPENED:
        vision = config.vision_config
        size = (vision.num_channels, vision.image_size, vision.image_size)
        return PixelRules(config.image_token_id, size, config.mm_tokens_per_image, is_opened=True)
    if config.model_type in _PATCHES:
        vision = config.vision_config
        channels: int = getattr(vision, "in_channels", 0) or vision.in_chans
        values = channels * vision.temporal_patch_size * vision.patch_size**2
        return PatchRules(config.image_token_id, values, vision.spatial_merge_size)
    return None


def deep_layers(config: Any) -> int:  # noqa: ANN401 -- as above
    """Return the number of decoder layers to whose outputs a model adds features of pictures (Qwen3-VL)."""
    return len(getattr(config.vision_config, "deepstack_visual_indexes", ()))

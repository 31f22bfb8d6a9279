"""Rules of a family of models for the pictures of a prompt. Numpy only.

Legend: I pictures, P prompt tokens, K placeholder tokens of the prompt.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.media import Media, MediaKind

Ints = NDArray[np.int64]

_PIXELS: Final = ("idefics3", "smolvlm")
FAMILIES: Final = _PIXELS
"""Values of ``model_type`` of the families whose pictures are supported."""


@dataclass(frozen=True, slots=True)
class PictureRules:
    """Layout of the pictures that a model reads, and the tokens that one takes in a prompt."""

    placeholder: int  # token id
    kind: MediaKind
    size: tuple[int, int, int]  # channels, height and width of every picture
    tokens: int  # placeholder tokens of one picture

    def problem(
        self, prompt_ids: Sequence[int] | NDArray[np.generic], media: Media, *, is_history: bool
    ) -> str:
        """Return why a prompt with these pictures cannot be computed; empty if it can.

        Args:
            prompt_ids: Token ids of the prompt.
            media: Its pictures.
            is_history: Sampled tokens may follow the prompt, placeholder ids among them.
        """
        if media.kind is not self.kind:
            return f"has pictures as {media.kind.value}, and the model reads {self.kind.value}"
        for index, size in enumerate(media.sizes.tolist()):
            if tuple(size) != self.size:
                return f"has a picture {index} of {size}, and the model reads {list(self.size)}"
        blank = np.flatnonzero(~media.values.reshape(len(media.sizes), -1).any(1))
        if len(blank):
            return f"has a picture {blank[0]} of zeros, which the model takes for padding"
        features, placeholders = self.features(media), self._placeholders(prompt_ids)
        if len(placeholders) < features or (len(placeholders) > features and not is_history):
            return f"has {len(placeholders)} placeholder tokens, and its pictures take {features}"
        return ""

    def features(self, media: Media) -> int:
        """Return the number of features that the tower makes of pictures: placeholders they need."""
        return len(media.sizes) * self.tokens

    def places(self, prompt_ids: Sequence[int] | NDArray[np.generic], media: Media) -> Ints:
        """Return the indices [K] of the tokens of the pictures of a prompt.

        Placeholder ids behind the last of them were sampled, and are ordinary tokens.
        """
        return self._placeholders(prompt_ids)[: self.features(media)]

    def _placeholders(self, prompt_ids: Sequence[int] | NDArray[np.generic]) -> Ints:
        return np.flatnonzero(np.asarray(prompt_ids) == self.placeholder)


@dataclass(frozen=True, slots=True)
class PlacedPictures:
    """Pictures of the prompts of one forward pass, and where their features stand in its rows.

    A prompt that several rows hold has its pictures once.
    """

    media: tuple[Media, ...]  # of the prompts that have pictures
    places_K: Ints  # indices into the flattened rows
    sources_K: Ints  # index of the feature of each place, over all of ``media``


def blank(rules: PictureRules) -> PlacedPictures:
    """Return a picture that no prompt has, for a pass that has to compute the tower nevertheless."""
    values = np.ones(int(np.prod(rules.size)), np.float32)
    nowhere = np.zeros(0, np.int64)
    media = Media(rules.kind, values, np.array([rules.size], np.int32))
    return PlacedPictures((media,), nowhere, nowhere)


def placed(
    rules: PictureRules,
    prompts: Sequence[Sequence[int] | NDArray[np.generic]],
    media: Sequence[Media | None],
    rows: Sequence[tuple[int, int]],
) -> PlacedPictures | None:
    """Place the pictures of prompts in rows; None if no row's prompt has one.

    Args:
        rules: Rules that all prompts comply with.
        prompts: Token ids of each prompt.
        media: Pictures of each prompt.
        rows: Of each row, the index of its prompt, and that of its first token in the flattened
            rows.
    """
    firsts, kept, count = dict[int, int](), list[Media](), 0
    places, sources = list[Ints](), list[Ints]()
    for prompt, start in rows:
        own = media[prompt]
        if own is None:
            continue
        within = rules.places(prompts[prompt], own)
        if prompt not in firsts:
            firsts[prompt] = count
            kept.append(own)
            count += len(within)
        places.append(start + within)
        sources.append(firsts[prompt] + np.arange(len(within)))
    if not kept:
        return None
    return PlacedPictures(tuple(kept), np.concatenate(places), np.concatenate(sources))


def picture_rules(config: Any) -> PictureRules | None:  # noqa: ANN401 -- transformers' config, which it does not type
    """Return the rules of a model by its config; None for one whose pictures are not supported."""
    if config.model_type not in _PIXELS:
        return None
    vision = config.vision_config
    side, patches = vision.image_size, vision.image_size // vision.patch_size
    return PictureRules(
        placeholder=config.image_token_id,
        kind=MediaKind.PIXELS,
        size=(vision.num_channels, side, side),
        tokens=patches**2 // config.scale_factor**2,
    )

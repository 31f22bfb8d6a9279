"""Rules of a model for the media of a prompt. Numpy only.

A medium enters a model at the placeholder tokens of its prompt. An encoder makes one feature per
placeholder, which replaces the embedding there.

Legend: P prompt tokens, K placeholder tokens of the prompt, F features.

The module also names the tokens that represent media in a model's prompts. A text without media
must not contain them: a token such as ``<|image_pad|>`` would mark the place of a missing medium.
transformers' own pass would fail there, and the model has never seen this in training. If a policy
samples such a token, it is an ordinary token (``offbeat.models``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.environments.media_prompts import find_media
from offbeat.messages.media import Media

Ints = NDArray[np.int64]
Tokens = Sequence[int] | NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Rules of a model that reads only text. A plug-in for media has a subclass.

    Methods about an encoder raise ``NotImplementedError`` if the model has none.
    """

    placeholder: int  # token id
    _: KW_ONLY
    noun: str = "media"  # plural of a medium, for messages
    reads_media: bool = False  # whether the model has an encoder of media
    has_axes: bool = False  # whether tokens of a medium have positions on three axes
    opens_attention: bool = False  # whether the tokens of a medium attend to each other both ways
    deep_layers: int = 0  # number of decoder layers with features added to their outputs

    def count_features(self, media: Media) -> int:
        """Return the number of features that the encoder makes. It is one per placeholder."""
        raise NotImplementedError

    def max_features(self, nbytes: int) -> int:
        """Return the maximum number of features for media with this many bytes of values."""
        raise NotImplementedError

    def example(self, rng: np.random.Generator) -> Media:
        """Return one medium of random values that the model reads."""
        raise NotImplementedError

    def merge(self, media: Sequence[Media]) -> Media:
        """Return the media of several prompts as one batch of the encoder, in order."""
        raise NotImplementedError

    def cut(self, media: Media, max_tokens: int) -> list[Media]:
        """Return views of media in order. Each has at most ``max_tokens``, or a single medium."""
        raise NotImplementedError

    def encode(self, model: Any, media: Sequence[Media]) -> Any:  # noqa: ANN401 -- torch is not loaded here
        """Run the model's encoder and return ``passes.Features``, with a gradient if trained."""
        raise NotImplementedError

    def plain_inputs(self, model: Any, media: Media, ids_RT: Any) -> dict[str, Any]:  # noqa: ANN401 -- as above
        """Return the arguments by which transformers' own forward pass gets media."""
        raise NotImplementedError

    def layout_problem(self, media: Media) -> str:
        """Return why the model does not read media of this layout, or empty if it does."""
        return f"has media ({', '.join(media)}), but the model reads only text"

    def problem(self, prompt_ids: Tokens, media: Media, *, is_history: bool) -> str:
        """Return why a prompt with these media cannot be computed, or empty if it can.

        Args:
            prompt_ids: Token ids of the prompt.
            media: Its media.
            is_history: Whether sampled tokens may follow the prompt, including placeholder ids.
        """
        if problem := self.layout_problem(media):
            return problem
        features, placeholders = self.count_features(media), self._placeholders(prompt_ids)
        if len(placeholders) < features or (len(placeholders) > features and not is_history):
            return (
                f"has {len(placeholders)} placeholder tokens, but its {self.noun} take {features}"
            )
        return ""

    def places(self, prompt_ids: Tokens, media: Media) -> Ints:
        """Return the indices [K] of the placeholders of a prompt's media.

        Placeholder ids after the last of these were sampled, and are ordinary tokens.
        """
        return self._placeholders(prompt_ids)[: self.count_features(media)]

    def shift(self, media: Media | None) -> int:
        """Return how far the positions of all tokens after a prompt with these media shift."""
        del media
        return 0

    def axes(self, prompt_ids: Tokens, media: Media | None) -> Ints:
        """Return the positions [3, P] of a prompt's tokens on three axes."""
        del media
        return np.tile(np.arange(len(prompt_ids)), (3, 1))

    def _placeholders(self, prompt_ids: Tokens) -> Ints:
        return np.flatnonzero(np.asarray(prompt_ids) == self.placeholder)


TEXT_ONLY: Final = MediaRules(-1)
"""Rules of a model that reads no media. No token has its placeholder id."""


def media_rules(config: Any) -> MediaRules:  # noqa: ANN401 -- transformers' config, which it does not type
    """Return the rules for a model's config, or ``TEXT_ONLY`` if no plug-in reads its media."""
    return find_media().rules(config) or TEXT_ONLY


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Tokens of a model that represent media, and the rules of the media themselves."""

    name_by_id: Mapping[int, str] = field(default_factory=dict[int, str])
    rules: MediaRules = TEXT_ONLY
    stray_reason: str = "stray_media_token"  # of a group with such a token in its text
    unusable_reason: str = "media_unusable"  # of a group with unfit media

    def problem_of_text(self, token_ids: Sequence[int]) -> str:
        """Return the token of a text that represents a medium, or empty if no token does."""
        if self.name_by_id.keys().isdisjoint(token_ids):
            return ""
        place, found = next(each for each in enumerate(token_ids) if each[1] in self.name_by_id)
        return (
            f"has the token {self.name_by_id[found]!r} ({found}) at position {place} without "
            f"{self.rules.noun}: the model would read a placeholder there. Remove it from the text, or "
            f"name the {self.rules.noun}"
        )

    def problem_of_prompt(self, token_ids: Sequence[int], media: Media | None) -> str:
        """Return why a first observation cannot be computed as intended, or empty if it can.

        Args:
            token_ids: Ids of the prompt, without sampled tokens.
            media: Its media, or None if it is a text.
        """
        if media is None:
            return self.problem_of_text(token_ids)
        if not self.rules.reads_media:
            return ""  # refused by trainer and engine
        return self.rules.problem(token_ids, media, is_history=False)


TEXT_ALONE: Final = MediaTokens()
"""Tokens of a model that reads no media: none."""


def media_tokens(
    path: str,
    tokenizer: Any,  # noqa: ANN401 -- of transformers
    *,
    trust_remote_code: bool,
) -> MediaTokens:
    """Return the media tokens of the model at ``path``, or ``TEXT_ALONE`` if it has none.

    Raises:
        OSError: The config cannot be read.
        ValueError: transformers does not know the model type.
    """
    found = find_media().tokens(path, tokenizer, trust_remote_code=trust_remote_code)
    return TEXT_ALONE if found is None else found

"""Rules of a model for the media of a prompt. Numpy only.

A medium enters a model at the placeholder tokens of its prompt: an encoder makes one feature per
placeholder, which replaces the embedding there.

Legend: P prompt tokens, K placeholder tokens of the prompt, F features.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.doors import find_media
from offbeat.messages.media import Media

Ints = NDArray[np.int64]
Tokens = Sequence[int] | NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Rules of a model that reads text only. An option that makes media subclasses it.

    Methods about an encoder raise ``NotImplementedError`` if the model has none.
    """

    placeholder: int  # token id
    _: KW_ONLY
    noun: str = "media"  # plural of a medium, for messages
    reads_media: bool = False  # whether the model has an encoder of media
    has_axes: bool = False  # whether a token of a medium has a position on each of three axes
    opens_attention: bool = False  # whether the tokens of a medium attend to each other both ways
    deep_layers: int = 0  # decoder layers to whose outputs the model adds features

    def count_features(self, media: Media) -> int:
        """Return the number of features that the encoder makes: the placeholders that media need."""
        raise NotImplementedError

    def max_features(self, nbytes: int) -> int:
        """Return the most features of media whose values have so many bytes."""
        raise NotImplementedError

    def example(self, rng: np.random.Generator) -> Media:
        """Return one medium of random values that the model reads."""
        raise NotImplementedError

    def merge(self, media: Sequence[Media]) -> Media:
        """Return the media of several prompts as one batch of the encoder, in their order."""
        raise NotImplementedError

    def cut(self, media: Media, max_tokens: int) -> list[Media]:
        """Return views of media in their order, each of at most ``max_tokens`` or one medium."""
        raise NotImplementedError

    def encode(self, model: Any, media: Sequence[Media]) -> Any:  # noqa: ANN401 -- torch is not loaded here
        """Run the model's encoder and return ``passes.Features``, with a gradient if it is trained."""
        raise NotImplementedError

    def plain_inputs(self, model: Any, media: Media, ids_RT: Any) -> dict[str, Any]:  # noqa: ANN401 -- as above
        """Return the arguments by which transformers' own forward pass reads media."""
        raise NotImplementedError

    def layout_problem(self, media: Media) -> str:
        """Return why the model does not read media of this layout; empty if it does."""
        return f"has media ({', '.join(media)}), and the model reads only text"

    def problem(self, prompt_ids: Tokens, media: Media, *, is_history: bool) -> str:
        """Return why a prompt with these media cannot be computed; empty if it can.

        Args:
            prompt_ids: Token ids of the prompt.
            media: Its media.
            is_history: Sampled tokens may follow the prompt, placeholder ids among them.
        """
        if problem := self.layout_problem(media):
            return problem
        features, placeholders = self.count_features(media), self._placeholders(prompt_ids)
        if len(placeholders) < features or (len(placeholders) > features and not is_history):
            return (
                f"has {len(placeholders)} placeholder tokens, and its {self.noun} take {features}"
            )
        return ""

    def places(self, prompt_ids: Tokens, media: Media) -> Ints:
        """Return the indices [K] of the placeholders of a prompt's media.

        Placeholder ids behind the last of them were sampled, and are ordinary tokens.
        """
        return self._placeholders(prompt_ids)[: self.count_features(media)]

    def shift(self, media: Media | None) -> int:
        """Return what to add to the positions of all tokens behind a prompt with these media."""
        del media
        return 0

    def axes(self, prompt_ids: Tokens, media: Media | None) -> Ints:
        """Return the positions [3, P] of a prompt's tokens on three axes."""
        del media
        return np.tile(np.arange(len(prompt_ids)), (3, 1))

    def _placeholders(self, prompt_ids: Tokens) -> Ints:
        return np.flatnonzero(np.asarray(prompt_ids) == self.placeholder)


TEXT_ONLY: Final = MediaRules(-1)
"""Rules of a model that reads no media; no token has its placeholder id."""


class _MediaModels(Protocol):
    def rules(self, config: Any) -> MediaRules | None: ...  # noqa: ANN401 -- transformers' config


def media_rules(config: Any) -> MediaRules:  # noqa: ANN401 -- transformers' config, which it does not type
    """Return the rules of a model by its config; ``TEXT_ONLY`` if no option reads its media."""
    return cast("_MediaModels", find_media()).rules(config) or TEXT_ONLY

"""Tokens that represent media in the prompts of a model, which a text must not hold by itself.

A text that spells one, such as ``<|image_pad|>``, becomes a place for a medium that does not exist:
transformers' own pass would fail there, and a model has never seen it in training. A token that a
policy samples is a token like any other (``offbeat.models``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from offbeat.doors import find_media
from offbeat.messages.media import Media
from offbeat.models.media_rules import TEXT_ONLY, MediaRules


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Tokens of a model that represent media, and the rules of the media themselves."""

    name_by_id: Mapping[int, str] = field(default_factory=dict[int, str])
    rules: MediaRules = TEXT_ONLY
    stray_reason: str = "stray_media_token"  # of the failure of a group whose text has one
    unusable_reason: str = "media_unusable"  # of a group whose media do not fit its tokens

    def problem_of_text(self, token_ids: Sequence[int]) -> str:
        """Return which token of a text represents a medium; empty if none does."""
        if self.name_by_id.keys().isdisjoint(token_ids):
            return ""
        place, found = next(each for each in enumerate(token_ids) if each[1] in self.name_by_id)
        return (
            f"has the token {self.name_by_id[found]!r} ({found}) at position {place} without "
            f"{self.rules.noun}: the model would read a placeholder there. Remove it from the text, or "
            f"name the {self.rules.noun}"
        )

    def problem_of_prompt(self, token_ids: Sequence[int], media: Media | None) -> str:
        """Return why a first observation cannot be computed as it is meant; empty if it can.

        Args:
            token_ids: Ids of the prompt, nothing sampled among them.
            media: Its media; None: it is a text.
        """
        if media is None:
            return self.problem_of_text(token_ids)
        if not self.rules.reads_media:
            return ""  # refused by trainer and engine
        return self.rules.problem(token_ids, media, is_history=False)


TEXT_ALONE: Final = MediaTokens()
"""Tokens of a model that reads no media: none."""


class _MediaTokenizers(Protocol):
    def tokens(
        self,
        path: str,
        tokenizer: Any,  # noqa: ANN401 -- of transformers
        *,
        trust_remote_code: bool,
    ) -> MediaTokens | None: ...


def media_tokens(
    path: str,
    tokenizer: Any,  # noqa: ANN401 -- of transformers
    *,
    trust_remote_code: bool,
) -> MediaTokens:
    """Return the media tokens of the model at ``path``; ``TEXT_ALONE`` if it has none.

    Raises:
        OSError: The config cannot be read.
        ValueError: It is of a model type that transformers does not know.
    """
    option = cast("_MediaTokenizers", find_media())
    found = option.tokens(path, tokenizer, trust_remote_code=trust_remote_code)
    return TEXT_ALONE if found is None else found

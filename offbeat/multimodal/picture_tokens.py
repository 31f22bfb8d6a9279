"""Tokens that represent pictures in the prompts of a model, which a text must not hold by itself.

A text that spells one, such as ``<|image_pad|>``, becomes a place for a picture that does not exist:
transformers' own pass would fail there, and a model has never seen it in training. What a policy
samples is another matter: a token like any other (``offbeat.multimodal``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from offbeat.messages.media import Media
from offbeat.multimodal.picture_rules import PictureRules


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """Tokens of a model that represent pictures, and the rules of the pictures themselves."""

    name_by_id: Mapping[int, str] = field(default_factory=dict[int, str])
    rules: PictureRules | None = None  # None: the model reads no pictures, or of an unknown family

    def problem_of_text(self, token_ids: Sequence[int]) -> str:
        """Return which token of a text represents a picture; empty if none does."""
        if self.name_by_id.keys().isdisjoint(token_ids):
            return ""
        place, found = next(each for each in enumerate(token_ids) if each[1] in self.name_by_id)
        return (
            f"has the token {self.name_by_id[found]!r} ({found}) at position {place} without a "
            "picture: the model would read a place for one there. Take it out of the text, or name "
            "its picture"
        )

    def problem_of_prompt(self, token_ids: Sequence[int], media: Media | None) -> str:
        """Return why a first observation cannot be computed as it is meant; empty if it can.

        Args:
            token_ids: Ids of the prompt, nothing sampled among them.
            media: Its pictures; None: it is a text.
        """
        if media is None:
            return self.problem_of_text(token_ids)
        if self.rules is None:
            return ""  # refused by trainer and engine
        return self.rules.problem(token_ids, media, is_history=False)


TEXT_ALONE: Final = PictureTokens()
"""Picture tokens of a model that reads no pictures: none."""

"""Canary prompts with media. Without them, a release's media encoder would not be checked.

The manifest has the tokens of a canary. Trainer and engine compute the canary's media from these
tokens, with the same function.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from offbeat.messages.media import Media
from offbeat.models.media_rules import MediaRules
from offbeat.weight_sync.canary import prompts

Prompts = tuple[tuple[int, ...], ...]

_TEXT_ONLY: Final = 2
"""Number of canary prompts without media."""


def canary_prompts(vocabulary: int, rules: MediaRules) -> Prompts:
    """Return canary prompts of equal length, some of them with media if the model reads any."""
    texts = prompts(vocabulary)
    if not rules.reads_media:
        return texts
    another = (rules.placeholder + 1) % vocabulary
    texts = [
        tuple(another if token == rules.placeholder else token for token in text) for text in texts
    ]
    placeholders = (rules.placeholder,) * rules.count_features(_medium(rules))
    tail = texts[0] * -(-len(placeholders) // len(texts[0]))
    return tuple(
        text + (tail[: len(placeholders)] if index < _TEXT_ONLY else placeholders) + text[:1]
        for index, text in enumerate(texts)
    )


def canary_media(rules: MediaRules, asked: Sequence[Sequence[int]]) -> list[Media | None]:
    """Return the media of canary prompts. A prompt has a medium if it has placeholders for one."""
    if not rules.reads_media:
        return [None] * len(asked)
    media = _medium(rules)
    return [None if rules.problem(prompt, media, is_history=False) else media for prompt in asked]


def _medium(rules: MediaRules) -> Media:
    return rules.example(np.random.default_rng(0))

"""Canary prompts with pictures: without them a release is not checked for its vision tower.

The manifest has the tokens of a canary. Its pictures are a function of them, which trainer and engine
compute alike.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from offbeat.messages.media import Media
from offbeat.multimodal.picture_rules import PictureRules
from offbeat.weight_sync.canary import prompts

Prompts = tuple[tuple[int, ...], ...]

_TEXT_ONLY: Final = 2
"""Number of canary prompts without a picture."""


def canary_prompts(vocabulary: int, rules: PictureRules | None) -> Prompts:
    """Return the canary prompts of a model: of equal length, some with a picture if it reads any."""
    texts = prompts(vocabulary)
    if rules is None:
        return texts
    another = (rules.placeholder + 1) % vocabulary
    texts = [
        tuple(another if token == rules.placeholder else token for token in text) for text in texts
    ]
    pictures = (rules.placeholder,) * rules.features(_picture(rules))
    tail = texts[0] * -(-len(pictures) // len(texts[0]))
    return tuple(
        text + (tail[: len(pictures)] if index < _TEXT_ONLY else pictures) + text[:1]
        for index, text in enumerate(texts)
    )


def canary_media(rules: PictureRules | None, asked: Sequence[Sequence[int]]) -> list[Media | None]:
    """Return the pictures of canary prompts: those with placeholders for one picture have one."""
    if rules is None:
        return [None] * len(asked)
    media = _picture(rules)
    return [None if rules.problem(prompt, media, is_history=False) else media for prompt in asked]


def _picture(rules: PictureRules) -> Media:
    return rules.example(np.random.default_rng(0))

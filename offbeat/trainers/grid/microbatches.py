"""Microbatches of pictures, which a tower computes one after another. Numpy only."""

import numpy as np

from offbeat.messages.media import Media
from offbeat.multimodal.picture_rules import PictureRules


def picture_microbatches(
    pictures: Media, rules: PictureRules, max_tokens: int | None
) -> list[Media]:
    """Return pictures in their order, in microbatches of at most ``max_tokens`` tokens.

    A picture of more tokens is a microbatch of its own. None: all are one. The microbatches share the
    memory of the pictures.
    """
    if max_tokens is None or rules.features(pictures) <= max_tokens:
        return [pictures]
    elements = pictures.sizes.astype(np.int64).prod(1)
    # Values of a picture are so many for each pixel and channel, or for each patch.
    each = len(pictures.values) // int(elements.sum())
    ends: list[int] = np.concatenate([[0], np.cumsum(elements * each)]).tolist()

    def between(first: int, end: int) -> Media:
        values = pictures.values[ends[first] : ends[end]]
        return Media(pictures.kind, values, pictures.sizes[first:end])

    cut, first, count = list[Media](), 0, len(pictures.sizes)
    for end in range(1, count + 1):
        if end == count or rules.features(between(first, end + 1)) > max_tokens:
            cut.append(between(first, end))
            first = end
    return cut

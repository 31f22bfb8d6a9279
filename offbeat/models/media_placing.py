"""Media of the prompts of one forward pass, and their places in its rows. Numpy only.

Legend: R rows, T tokens of a row, K placeholder tokens in all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.media import Media
from offbeat.models.media_rules import Ints, MediaRules, Tokens


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """Media of the prompts of one forward pass, and the places of their features in its rows.

    If several rows hold the same prompt, its media are stored once.
    """

    media: tuple[Media, ...]  # of the prompts with media
    places_K: Ints  # indices into the flattened rows
    sources_K: Ints  # index of the feature of each place, over all of ``media``
    axes_3RT: Ints | None = None  # positions on three axes, if the model has axes
    blocks_K: Ints | None = None  # tokens of a block attend to each other, if the model has blocks

    def opened(self, seen_RTT: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask [R, T, T], changed so that tokens of each block attend to each other."""
        if self.blocks_K is None:
            return seen_RTT
        blocks_RT = np.full(seen_RTT.shape[:2], -1, np.int64)
        blocks_RT.reshape(-1)[self.places_K] = self.blocks_K
        same_RTT = blocks_RT[:, :, None] == blocks_RT[:, None, :]
        return seen_RTT | (same_RTT & (blocks_RT[:, :, None] >= 0))


class RowSpan(NamedTuple):
    """A prompt in the flattened rows."""

    prompt: int  # its index
    start: int  # of its first token
    end: int  # of the last token behind it


def blank(rules: MediaRules) -> PlacedMedia:
    """Return a medium without a prompt, for a pass that must run the encoder without media."""
    nowhere = np.zeros(0, np.int64)
    return PlacedMedia((rules.example(np.random.default_rng(0)),), nowhere, nowhere)


def place_media(
    rules: MediaRules,
    prompts: Sequence[Tokens],
    media: Sequence[Media | None],
    spans: Sequence[RowSpan],
    positions_RT: Ints,
) -> PlacedMedia | None:
    """Place the media of prompts in rows. Return None if no row's prompt has media.

    Args:
        rules: Rules that all prompts follow.
        prompts: Token ids of each prompt.
        media: Media of each prompt.
        spans: Where the prompts are in the rows, with all tokens that attend to each prompt.
        positions_RT: Positions as in a model without axes.
    """
    firsts, kept, count = dict[int, int](), list[Media](), 0
    places, sources = list[Ints](), list[Ints]()
    axes_3RT = np.tile(positions_RT, (3, 1, 1)) if rules.has_axes else None
    for prompt, start, end in spans:
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
        if axes_3RT is not None:
            flat, length = axes_3RT.reshape(3, -1), len(prompts[prompt])
            flat[:, start : start + length] = rules.axes(prompts[prompt], own)
            flat[:, start + length : end] += rules.shift(own)
    if not kept:
        return None
    places_K = np.concatenate(places)
    blocks_K = np.cumsum(np.diff(places_K, prepend=-2) != 1) if rules.opens_attention else None
    return PlacedMedia(tuple(kept), places_K, np.concatenate(sources), axes_3RT, blocks_K)


def place_media_by_row(
    rules: MediaRules,
    prompts: Sequence[Tokens],
    media: Sequence[Media | None],
    positions_RT: Ints,
) -> PlacedMedia | None:
    """Place media like ``place_media``, with one prompt per row."""
    rows, tokens = positions_RT.shape
    spans = [RowSpan(row, row * tokens, (row + 1) * tokens) for row in range(rows)]
    return place_media(rules, prompts, media, spans, positions_RT)

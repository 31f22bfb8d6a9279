"""Pictures as a processor would leave them, for tests without a model."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.models.media_passes import Features
from offbeat.models.media_rules import media_rules
from offbeat.plugins.images.pictures import MediaKind, Pictures


def pixels(*sizes: tuple[int, int, int], seed: int = 0) -> Media:
    """Pictures of these channels, heights and widths, with values drawn by ``seed``."""
    count = sum(int(np.prod(size)) for size in sizes)
    values = np.random.default_rng(seed).standard_normal(count, np.float32)
    return Pictures(MediaKind.PIXELS, values, np.array(sizes, np.int32)).media


def patches(*grids: tuple[int, int, int], values_per_patch: int = 6) -> Media:
    """Pictures of these grids, all values zero."""
    count = sum(int(np.prod(grid)) for grid in grids) * values_per_patch
    return Pictures(MediaKind.PATCHES, np.zeros(count, np.float32), np.array(grids, np.int32)).media


def features(model: PreTrainedModel, media: Sequence[Media]) -> Features:
    """The features that a model's own tower makes of pictures."""
    return media_rules(model.config).encode(model, media)

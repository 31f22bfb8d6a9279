"""Pictures as a processor would leave them, for tests without a model."""

import numpy as np

from offbeat.messages.media import Media, MediaKind


def pixels(*sizes: tuple[int, int, int], seed: int = 0) -> Media:
    """Pictures of these channels, heights and widths, with values drawn by ``seed``."""
    count = sum(int(np.prod(size)) for size in sizes)
    values = np.random.default_rng(seed).standard_normal(count, np.float32)
    return Media(MediaKind.PIXELS, values, np.array(sizes, np.int32))


def patches(*grids: tuple[int, int, int], values_per_patch: int = 6) -> Media:
    """Pictures of these grids, all values zero."""
    count = sum(int(np.prod(grid)) for grid in grids) * values_per_patch
    return Media(MediaKind.PATCHES, np.zeros(count, np.float32), np.array(grids, np.int32))

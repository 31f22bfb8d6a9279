"""Pictures of dry runs: noise that no model reads."""

import math
from typing import Final

import numpy as np

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.messages.media import Media
from offbeat.plugins.images.pictures import MediaKind, Pictures

_PICTURE: Final = (3, 32, 32)
_SIZES_BYTES: Final = 16  # of one picture: three sides and the kind


def stub_media(config: EnvironmentConfig, row: int) -> Media | None:
    """Return one picture of 3 x 32 x 32, or of one value if the run has no room for it."""
    if not config.has_media:
        return None
    fits = config.max_media_bytes >= math.prod(_PICTURE) * 4 + _SIZES_BYTES
    size = _PICTURE if fits else (1, 1, 1)
    values = np.random.default_rng(row).standard_normal(math.prod(size), np.float32)
    return Pictures(MediaKind.PIXELS, values, np.array([size], np.int32)).media

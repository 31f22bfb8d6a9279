# pyright: basic
# pyarrow has no types.
"""Columns of the rollout files about pictures: small copies, and the sizes of all pictures."""

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from offbeat.messages.media import Media
from offbeat.plugins.images.thumbnails import picture_sizes, thumbnails
from offbeat.telemetry import preview_column

PREVIEW_COLUMN: Final = "pictures"
_SIZES: Final = "picture_sizes"


def log_columns() -> Mapping[str, Any]:
    """Return the Arrow type of each column by its name."""
    sides = pa.struct([("height", pa.int32()), ("width", pa.int32())])
    return {PREVIEW_COLUMN: preview_column.TYPE, _SIZES: pa.list_(sides)}


def log_values(media: Media | None) -> tuple[Mapping[str, Any], int]:
    """Return the value of each column for a group, and the bytes of the small copies."""
    copies = thumbnails(media)
    sizes = [{"height": high, "width": wide} for high, wide in picture_sizes(media)]
    values = {PREVIEW_COLUMN: preview_column.written(copies), _SIZES: sizes}
    return values, sum(len(each.rgb) for each in copies)

"""The columns of a group whose prompt has pictures, and their check.

Legend: I pictures of the prompt, V values over all pictures.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.messages.media import Media, MediaKind
from offbeat.transfer_queue.schema import (
    MEDIA_COLUMNS,
    MEDIA_KIND,
    MEDIA_SIZES,
    MEDIA_VALUES,
    Columns,
    check_media,
)

_SIDES: Final = 3  # of a picture: channels, height, width; of a grid: t, h, w
_KINDS: Final = tuple(MediaKind)


def columns_of_media(media: Media) -> dict[str, NDArray[Any]]:
    """Return the columns that hold the pictures, checked.

    Raises:
        SchemaError: Sizes or values are of another type or shape, or do not fit each other.
    """
    sizes = np.asarray(media.sizes)
    if sizes.ndim != 2 or sizes.shape[1] != _SIDES:  # noqa: PLR2004 - pictures by sides
        raise SchemaError(MEDIA_SIZES, f"shape {sizes.shape}", "(pictures, 3)")
    columns = {
        MEDIA_VALUES: np.asarray(media.values),
        MEDIA_SIZES: sizes.reshape(-1),
        MEDIA_KIND: np.array([_KINDS.index(media.kind)], np.int32),
    }
    check_media(columns)
    return columns


def media_of(columns: Columns) -> Media | None:
    """Return the pictures of a group, as views of its columns; None: its prompt has none.

    Raises:
        SchemaError: As ``columns_of_media``; or one of the columns is missing.
    """
    if not any(name in columns for name in MEDIA_COLUMNS):
        return None
    check_media(columns)
    sizes: NDArray[Any] = columns[MEDIA_SIZES].reshape(-1, _SIDES)
    values: NDArray[Any] = columns[MEDIA_VALUES]
    return Media(_KINDS[int(columns[MEDIA_KIND][0])], values, sizes)

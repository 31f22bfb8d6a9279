"""Small copies of a prompt's pictures, made from the values that the model reads.

They are for people who look at a run. They are made from numbers, not files, so no byte of an
untrusted file reaches the run directory or a page.

Also defines the picture columns of the rollout files: small copies, and the sizes of all pictures.
"""

# pyright: basic
# pyarrow has no types.

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offbeat.messages.media import Media, Thumbnail
from offbeat.plugins.images.pictures import MediaKind, Pictures
from offbeat.telemetry import preview_column

THUMBNAILS: Final = 4
"""Maximum number of pictures copied per prompt. If a picture is cut into tiles, each tile
counts."""

LONGEST_SIDE: Final = 96
_MERGED: Final = 2  # patches per side that Qwen-VL merges and stores next to each other
_CHANNELS: Final = 3


def thumbnails(media: Media | None) -> list[Thumbnail]:
    """Return small copies of the first pictures, with contrast stretched to the whole range."""
    if media is None:
        return []
    pictures = Pictures.of(media)
    is_pixels = pictures.kind is MediaKind.PIXELS
    arrays = _pixels(pictures) if is_pixels else _join_patches(pictures)
    return [_small(array) for array, _ in zip(arrays, range(THUMBNAILS), strict=False)]


def picture_sizes(media: Media | None) -> list[tuple[int, int]]:
    """Return height and width in pixels of all pictures, as the model reads them.

    The list is empty if the layout of patches is unknown, as in ``thumbnails``.
    """
    if media is None:
        return []
    pictures = Pictures.of(media)
    sizes: list[list[int]] = pictures.sizes.tolist()
    if pictures.kind is MediaKind.PIXELS:
        return [(height, width) for _, height, width in sizes]
    length = len(pictures.values) // sum(map(math.prod, sizes))
    side = next((side for frames in (2, 1) if (side := _side(length, frames))), 0)
    return [(rows * side, columns * side) for _, rows, columns in sizes] if side else []


def _pixels(pictures: Pictures) -> Iterator[NDArray[Any]]:
    start = 0
    for size in pictures.sizes.tolist():
        end = start + math.prod(size)
        yield pictures.values[start:end].reshape(size)
        start = end


def _join_patches(pictures: Pictures) -> Iterator[NDArray[Any]]:
    """Yield the first frame of each picture, or nothing if the patches have a different layout."""
    grids = pictures.sizes.tolist()
    length = len(pictures.values) // sum(map(math.prod, grids))
    frames = next((f for f in (2, 1) if _side(length, f)), 0)
    start = 0
    for t, rows, columns in grids:
        end = start + t * rows * columns * length
        if not frames or t != 1 or rows % _MERGED or columns % _MERGED:
            return
        side, cells = _side(length, frames), (rows // _MERGED, columns // _MERGED)
        shape = (*cells, _MERGED, _MERGED, _CHANNELS, frames, side, side)
        patches = pictures.values[start:end].reshape(shape)[..., 0, :, :]
        # To channel, then row of cells, row in a cell, row in a patch, then the same for columns
        yield patches.transpose(4, 0, 2, 5, 1, 3, 6).reshape(_CHANNELS, rows * side, columns * side)
        start = end


def _side(length: int, frames: int) -> int:
    """Return the side of a patch with ``length`` values, or 0 if it is not square."""
    pixels, rest = divmod(length, _CHANNELS * frames)
    side = math.isqrt(pixels)
    return 0 if rest or side * side != pixels else side


def _small(picture: NDArray[Any]) -> Thumbnail:
    """Return a thumbnail of [channels, height, width]."""
    step = math.ceil(max(picture.shape[1:]) / LONGEST_SIDE)
    few = picture[:, ::step, ::step].astype(np.float64)
    if len(few) != _CHANNELS:
        few = np.repeat(few.mean(axis=0, keepdims=True), _CHANNELS, axis=0)
    low, high = few.min(), few.max()
    scaled = (few - low) * (255 / (high - low) if high > low else 0)
    rgb = np.rint(scaled).astype(np.uint8).transpose(1, 2, 0)
    return Thumbnail(rgb.shape[0], rgb.shape[1], rgb.tobytes())


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

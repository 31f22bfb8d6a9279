"""Pictures of a prompt, as a model's vision tower reads them: resized, normalised and cut.

Legend: I pictures, V values over all pictures.
"""

import enum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class MediaKind(enum.StrEnum):
    """Layout in which a family of models reads pictures; a closed set."""

    PIXELS = "pixels"  # whole pictures or tiles: Idefics3, SmolVLM, Gemma 3
    PATCHES = "patches"  # flattened patches of a grid: Qwen2-VL and its successors


class Media(msgspec.Struct, frozen=True, eq=False):
    """Pictures of one prompt, which all samples of its group share.

    The prompt's token ids already hold the placeholder tokens of each picture, in the order of the
    pictures. Values and sizes are checked where they are made and where they are read:
    ``transfer_queue.media_columns``.
    """

    kind: MediaKind
    values: "NDArray[np.float32]"
    """[V]: the pictures end to end. ``pixels``: [channels, height, width] each. ``patches``:
    [t * h * w, values of a patch] each; all patches have as many values."""
    sizes: "NDArray[np.int32]"
    """[I, 3]. ``pixels``: channels, height and width. ``patches``: the grid t, h, w."""


class Thumbnail(NamedTuple):
    """A small copy of a picture, of at most 96 pixels a side, for people who look at a run."""

    height: int
    width: int
    rgb: bytes  # height * width * 3, row by row

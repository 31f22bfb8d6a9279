"""Built-in task for models that read pictures: a digit in a generated picture.

Also has the pictures of dry runs: noise that no model reads.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.prompts import RowPrompts
from offbeat.messages.media import Media
from offbeat.plugins.images.errors import BadPicture
from offbeat.plugins.images.pictures import MediaKind, Pictures

if TYPE_CHECKING:
    from PIL.Image import Image


SIDE: Final = 32
_SCALE: Final = 3  # pixels per dot of the font
_FONT: Final = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "01110 10001 00001 00110 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)


Gray = NDArray[np.uint8]


class DigitPicture(NamedTuple):
    """Digit with its picture."""

    digit: int
    pixels: Gray  # [SIDE, SIDE]: black, the digit white


def picture(seed: int, index: int) -> DigitPicture:
    """Draw the picture of an index: a digit of 15 x 21 pixels at a random place."""
    rng = np.random.default_rng((seed, index))
    digit = int(rng.integers(10))
    dots = np.array([[int(dot) for dot in row] for row in _FONT[digit].split()], np.uint8)
    glyph: Gray = 255 * dots.repeat(_SCALE, 0).repeat(_SCALE, 1)
    height, width = len(glyph), len(glyph[0])
    top, left = int(rng.integers(SIDE - height + 1)), int(rng.integers(SIDE - width + 1))
    pixels = np.zeros((SIDE, SIDE), np.uint8)
    pixels[top : top + height, left : left + width] = glyph
    return DigitPicture(digit, pixels)


class DigitsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``environment.options`` of the environment ``digits``."""

    rows: Annotated[int, msgspec.Meta(ge=1)] = 65536
    """Prompts of an epoch. Evaluations have the same number of different prompts."""


class DigitPrompts(RowPrompts):
    """Prompts ``<image>=`` with a picture of one digit. The digit is the answer.

    A row's picture is a pure function of seed and row, so a prompt names it by these two numbers.
    Rows start at ``first``. Evaluations start where training ends.
    """

    def __init__(
        self, rows: int, *, seed: int, first: int = 0, shuffle: bool, epochs: int | None
    ) -> None:
        self._drawn_by, self._first = seed, first
        super().__init__(rows, shuffle=shuffle, seed=seed, epochs=epochs)

    def _data(self, row: int) -> dict[str, Any]:
        index = self._first + row
        drawn = {"seed": self._drawn_by, "index": index}
        return {
            "prompt": "<image>=",
            "answer": picture(self._drawn_by, index).digit,
            "image": drawn,
        }


def is_drawn(named: object) -> bool:
    """Return whether a row names its picture by a seed."""
    return isinstance(named, dict) and "seed" in named


def drawn(named: object) -> "Image":
    """Draw the picture that a row of this environment names, in RGB.

    Raises:
        BadPicture: The row has no valid seed and index.
    """
    from PIL import Image  # noqa: PLC0415 - of the extra vision

    match cast("Mapping[str, object]", named):
        case {"seed": int(seed), "index": int(index)} if seed >= 0 and index >= 0:
            return Image.fromarray(picture(seed, index).pixels).convert("RGB")
        case _:
            raise BadPicture(f"{named!r:.80}", "is not a drawn picture: give its seed and index")


_PICTURE: Final = (3, 32, 32)
_SIZES_BYTES: Final = 16  # of one picture: three sides and the kind


def stub_media(config: EnvironmentConfig, row: int) -> Media | None:
    """Return one picture of 3 x 32 x 32 values, or of one value if the media limit is too small."""
    if not config.has_media:
        return None
    fits = config.max_media_bytes >= math.prod(_PICTURE) * 4 + _SIZES_BYTES
    size = _PICTURE if fits else (1, 1, 1)
    values = np.random.default_rng(row).standard_normal(math.prod(size), np.float32)
    return Pictures(MediaKind.PIXELS, values, np.array([size], np.int32)).media

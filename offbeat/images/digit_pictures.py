"""Pictures of one digit each: a pure function of a seed and an index."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    """A digit, and the picture it stands in."""

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

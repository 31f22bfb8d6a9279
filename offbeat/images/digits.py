"""Built-in task for models that read pictures: a digit in a picture that is drawn, not read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from offbeat.environments.prompts import RowPrompts
from offbeat.images.digit_pictures import DigitPicture, picture
from offbeat.images.errors import BadPicture

if TYPE_CHECKING:
    from PIL.Image import Image


class DigitPrompts(RowPrompts):
    """Prompts ``<image>=`` with a picture of one digit, which is the answer.

    The picture of a row is a pure function of the seed and the row, so a prompt names it by these
    two. Rows from ``first`` on; evaluations begin where training ends.
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
    """Return whether a row names its picture by what it is drawn from."""
    return isinstance(named, dict) and "seed" in named


def drawn(named: object) -> "Image":
    """Return the picture that a row of this environment names, in RGB.

    Raises:
        BadPicture: It does not name one.
    """
    return _image(drawn_digit(named))


def drawn_digit(named: object) -> DigitPicture:
    """Return the picture and its digit; raises as ``drawn``."""
    fields = cast("Mapping[str, object]", named)
    match fields:
        case {"seed": int(seed), "index": int(index)} if seed >= 0 and index >= 0:
            return picture(seed, index)
        case _:
            raise BadPicture(f"{named!r:.80}", "is no drawn picture: give its seed and index")


def _image(drawn: DigitPicture) -> "Image":
    from PIL import Image  # noqa: PLC0415 - of the extra vision

    return Image.fromarray(drawn.pixels).convert("RGB")

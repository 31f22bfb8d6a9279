"""Media of a prompt: arrays that all samples of its group share, next to the tokens.

The core stores, sends and counts media, and never reads them. The option that makes them defines
names, shapes and meaning.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEDIA_PREFIX: Final = "media_"
"""Start of the name of every media column."""

Media = Mapping[str, "NDArray[Any]"]
"""Media of one prompt by column name. The prompt's token ids already hold their placeholders."""


class Thumbnail(NamedTuple):
    """Small image of a medium, at most 96 pixels a side, for people who look at a run."""

    height: int
    width: int
    rgb: bytes  # height * width * 3, row by row


def get_media(columns: Mapping[str, "NDArray[Any]"]) -> Media | None:
    """Return the media of a group's columns, or None if its prompt has none."""
    return {k: v for k, v in columns.items() if k.startswith(MEDIA_PREFIX)} or None


def media_bytes(media: Media | None) -> int:
    """Return the bytes that media need in the columns of their group."""
    return sum(values.nbytes for values in (media or {}).values())

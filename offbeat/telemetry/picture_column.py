# pyright: basic
# pyarrow has no types.
"""Column ``pictures`` of the files of a run: small copies of the pictures of a prompt."""

from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa

from offbeat.messages.media import Thumbnail

COLUMN: Final = "pictures"
TYPE: Final = pa.list_(
    pa.struct([("height", pa.int32()), ("width", pa.int32()), ("rgb", pa.binary())])
)


def written(pictures: Iterable[Thumbnail]) -> list[dict[str, Any]] | None:
    """Return the value of the column; None for a prompt without pictures."""
    return [each._asdict() for each in pictures] or None


def read(value: list[dict[str, Any]] | None) -> tuple[Thumbnail, ...]:
    """Return what ``written`` was given."""
    return tuple(Thumbnail(**each) for each in value or ())

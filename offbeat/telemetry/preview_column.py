# pyright: basic
# pyarrow has no types.
"""Defines the column of a run's files that holds small copies of a prompt's media."""

from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa

from offbeat.messages.media import Thumbnail

TYPE: Final = pa.list_(
    pa.struct([("height", pa.int32()), ("width", pa.int32()), ("rgb", pa.binary())])
)


def written(previews: Iterable[Thumbnail]) -> list[dict[str, Any]] | None:
    """Return the value of the column, or None for a prompt without media."""
    return [each._asdict() for each in previews] or None


def read(value: list[dict[str, Any]] | None) -> tuple[Thumbnail, ...]:
    """Return the thumbnails that were passed to ``written``."""
    return tuple(Thumbnail(**each) for each in value or ())

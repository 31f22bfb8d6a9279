"""Checks of arrays that a caller passes in or that are decoded from a buffer."""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue.codec.header import MOST_DIMENSIONS


def check_array(column: str, values: NDArray[Any]) -> None:
    """Vouch that these are values [rows, ...], and that nothing of them would be lost.

    Raises:
        SchemaError: They are not.
    """
    if isinstance(values, np.ma.MaskedArray) or not isinstance(cast("object", values), np.ndarray):
        kind = type(cast("object", values)).__name__
        raise SchemaError(column, f"a {kind}", "an ndarray, a Ragged or a list")
    if not 1 <= values.ndim <= MOST_DIMENSIONS:
        want = f"1 to {MOST_DIMENSIONS}: rows first"
        raise SchemaError(column, f"of {values.ndim} dimensions", want)
    if (problem := unsound_bools(values)) is not None:
        raise SchemaError(column, problem, "bytes of 0 or 1: use astype, not view")


def unsound_bools(values: NDArray[Any]) -> str | None:
    """Return the problem of a bool array [rows, ...], if any: numpy relies on masks being 0 or 1."""
    if values.dtype != np.bool_ or not values.size:
        return None
    most = values.view(np.uint8).max()
    return None if most <= 1 else f"bool with a byte of {most}"


def disorder(offsets: NDArray[Any]) -> str | None:
    """Return the problem of the offsets [rows + 1] of ragged rows, if any; their end is not checked."""
    if offsets.ndim != 1 or len(offsets) < 1:
        return f"offsets of shape {offsets.shape}"
    if offsets[0] != 0:
        return f"offsets that start at {offsets[0]}"
    falling = offsets[1:] < offsets[:-1]
    return f"offsets that fall at {falling.argmax() + 1}" if falling.any() else None

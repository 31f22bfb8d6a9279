"""Element types that a column may have, and their names on the wire: little-endian everywhere."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError

BFLOAT16: Final = np.dtype([("bfloat16", "<u2")])
"""bfloat16 without a library for it: two bytes per element, which numpy can store but not compute
with.

``bits.view(BFLOAT16)`` makes such an array from uint16, ``array.view(np.uint16)`` gives the bits
back; arrays of the ml_dtypes type of that name are accepted too.
"""

WIRE: Final[dict[str, np.dtype[Any]]] = {
    "bool": np.dtype("?"),
    **{
        f"{sign}int{8 * size}": np.dtype(f"<{sign or 'i'}{size}")
        for sign in ("", "u")
        for size in (1, 2, 4, 8)
    },
    **{f"float{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "bfloat16": BFLOAT16,
}
"""Every dtype name that a header may contain."""

_KNOWN: Final = {
    spelled: (name, dtype)
    for name, dtype in WIRE.items()
    for spelled in (dtype, dtype.newbyteorder(">"))
}


def typed(column: str, values: NDArray[Any]) -> tuple[str, np.dtype[Any], NDArray[Any]]:
    """Return the name and the type that values [rows, ...] have once they are written, and the values.

    They are returned unchanged, except another library's bfloat16: the same memory under our dtype.

    Raises:
        SchemaError: An unsupported type: objects, strings, dates, complex and structured values.
    """
    if (known := _KNOWN.get(values.dtype)) is not None:
        return *known, values
    if values.dtype.name == "bfloat16":
        return "bfloat16", BFLOAT16, values.view(BFLOAT16)
    raise SchemaError(column, f"dtype {values.dtype}", f"one of {', '.join(WIRE)}; or a list")

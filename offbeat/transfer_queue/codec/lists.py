"""Plain columns: lists of plain values as msgpack, which carries data and no code."""

from collections.abc import Iterable
from typing import Any, Final, cast

import msgspec

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue.codec.errors import CorruptPayload

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_DEEPEST: Final = 64
_PLAIN: Final = "None, bool, int, float, str, bytes, list, or dict with str keys"
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list)


def encode_list(column: str, rows: list[Any]) -> bytes:
    """Encode the rows as msgpack; decoding gives equal values of the very same types.

    Raises:
        SchemaError: A value that would be decoded as another type (a tuple, an enum, a date, a
            numpy scalar), an int beyond 64 bits, text that is not UTF-8, or nesting deeper than 64.
    """
    if (problem := _problem(rows, 0)) is not None:
        raise SchemaError(column, problem, _PLAIN)
    try:
        return _encoder.encode(rows)
    except (OverflowError, UnicodeEncodeError) as error:
        raise SchemaError(column, str(error), "int of 64 bits, and text that is UTF-8") from error


def decode_list(field: str, content: memoryview) -> list[Any]:
    """Decode the rows in ``content``: only types that :func:`encode_list` accepts.

    Raises:
        CorruptPayload: It holds something else.
    """
    try:
        rows = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptPayload(field, str(error), "a list in msgpack") from error
    if (problem := _problem(rows, 0)) is not None:
        raise CorruptPayload(field, problem, _PLAIN)
    return rows


def _problem(value: object, depth: int) -> str | None:
    """Return the first problem of ``value``, if it is not plain data."""
    kind = type(value)
    if kind in _SCALARS:
        return None
    if depth > _DEEPEST:
        return f"a list nested deeper than {_DEEPEST}"
    if kind is list:
        inner: Iterable[object] = cast("list[object]", value)
    elif kind is dict:
        for key in cast("dict[object, object]", value):
            if type(key) is not str:
                return f"a list with the dict key {key!r}"
        inner = cast("dict[str, object]", value).values()
    else:
        return f"a list with a {kind.__module__}.{kind.__qualname__}"
    found = (_problem(item, depth + 1) for item in inner)
    return next((problem for problem in found if problem is not None), None)

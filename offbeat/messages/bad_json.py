"""Explains to people why bytes are not JSON.

The decoder in use reports only the byte at which it stops. Python's own decoder accepts more input,
so it is used to describe the problem at that byte.

The module also measures the nesting of JSON values written by other people or by a model.
"""

import json
from typing import Final, TypeVar, cast

import msgspec

ENDS_EARLY: Final = "is not JSON: it ends too early"


T = TypeVar("T")


def decode_json(text: bytes, kind: type[T]) -> T:
    """Decode JSON from an untrusted source.

    Raises:
        msgspec.DecodeError: It is not JSON, has a different type, or is nested too deeply.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(json_problem(text)) from error


class _NotFinite(ValueError):
    """Number in Python's notation that JSON does not have, such as NaN."""


def json_problem(text: bytes) -> str:
    """Return why ``text`` is not JSON, and the fix. A strict decoder must have refused ``text``."""
    try:
        value: object = json.loads(text.decode(), parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return _describe(error)
    return "is not JSON that can be read"


def _describe(error: ValueError | RecursionError) -> str:
    match error:
        case UnicodeDecodeError():
            found = error.object[error.start]
            return f"is not UTF-8: byte {error.start} is 0x{found:02x}; write it as UTF-8"
        case UnicodeEncodeError():
            problem = (
                f"holds \\u{ord(error.object[error.start]):04x}, a lone surrogate, which is half"
            )
            return f"{problem} of a character, not text; remove it, or write the whole character"
        case _NotFinite():
            return f"holds {error}, which JSON does not have; write null, or leave the key out"
        case json.JSONDecodeError():
            is_cut = error.pos >= len(error.doc.rstrip())
            return ENDS_EARLY if is_cut else f"is not JSON: {error.msg} (character {error.pos})"
        case RecursionError():
            return "is not JSON that can be read: it is nested too deeply"
        case _:
            return "holds a number that is too large"


def _refuse(number: str) -> object:
    raise _NotFinite(number)


DEEPEST: Final = 100
"""Maximum nesting of lists and objects: far below the limit of recursive readers and writers."""


def nesting_depth(value: object) -> int:
    """Return the nesting depth of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [
            child
            for each in cast("list[dict[str, object] | list[object]]", level)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return depth

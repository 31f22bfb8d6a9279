"""What a client of the store asks, and what it is answered."""

import msgspec


class Set(msgspec.Struct, frozen=True, tag=True):
    """Give each key its value."""

    keys: list[str]
    values: list[bytes]


class Get(msgspec.Struct, frozen=True, tag=True):
    """Answer with the values of all keys once they are there."""

    keys: list[str]
    timeout_s: float


class Check(msgspec.Struct, frozen=True, tag=True):
    """Answer whether all keys are there: 1 or 0."""

    keys: list[str]


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add to a decimal number, 0 at first, and answer with the sum."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, frozen=True, tag=True):
    """Replace a value if it is the expected one, and answer with what is there then.

    A key that is not there is set if nothing is expected, and answered with what was expected if not.
    """

    key: str
    expected: bytes
    desired: bytes


class Append(msgspec.Struct, frozen=True, tag=True):
    """Add bytes to the end of a value, empty at first."""

    key: str
    value: bytes


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Remove a key, and answer whether it was there: 1 or 0."""

    key: str


class Count(msgspec.Struct, frozen=True, tag=True):
    """Answer with the number of keys."""


StoreRequest = Set | Get | Check | Add | CompareSet | Append | Delete | Count


class StoreReply(msgspec.Struct, frozen=True):
    """The answer to one request."""

    number: int = 0
    values: list[bytes] = []
    is_late: bool = False  # the keys were not there in time

"""Requests of a store's clients, and the replies."""

import msgspec


class Set(msgspec.Struct, frozen=True, tag=True):
    """Give each key its value."""

    keys: list[str]
    values: list[bytes]


class Get(msgspec.Struct, frozen=True, tag=True):
    """Reply with the values of all keys once they are set."""

    keys: list[str]
    timeout_s: float


class Check(msgspec.Struct, frozen=True, tag=True):
    """Reply whether all keys are set: 1 or 0."""

    keys: list[str]


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add to a decimal number, initially 0, and reply with the sum."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, frozen=True, tag=True):
    """Replace a value if it is the expected one, and reply with the value afterwards.

    A missing key is set if the expected value is empty; otherwise the reply is the expected value.
    """

    key: str
    expected: bytes
    desired: bytes


class Append(msgspec.Struct, frozen=True, tag=True):
    """Add bytes to the end of a value, empty at first."""

    key: str
    value: bytes


class Delete(msgspec.Struct, frozen=True, tag=True):
    """Remove a key, and reply whether it existed: 1 or 0."""

    key: str


class Count(msgspec.Struct, frozen=True, tag=True):
    """Reply with the number of keys."""


StoreRequest = Set | Get | Check | Add | CompareSet | Append | Delete | Count


class StoreReply(msgspec.Struct, frozen=True):
    """Reply to one request."""

    number: int = 0
    values: list[bytes] = []
    is_late: bool = False  # the keys were not there in time

"""The address of a process that no other machine reaches."""

from typing import NoReturn


def no_address() -> NoReturn:
    raise AssertionError("a process without other machines was asked for its address")

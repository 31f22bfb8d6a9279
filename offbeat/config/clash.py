"""Defines the result of a cross-check."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clash:
    """Settings that do not go together. The first of ``keys`` is the one to look at."""

    keys: tuple[str, ...]
    message: str
    hint: str

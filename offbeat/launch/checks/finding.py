"""Defines one line of the check report."""

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # it will run, not as meant
    ERROR = "error"  # it cannot work


@dataclass(frozen=True, slots=True)
class Finding:
    """The subject of a check and its result. Any result that is not ok says how to fix it."""

    level: Level
    subject: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8}{self.subject}: {self.message}"
        return f"{line}\n        -> {self.fix}" if self.fix else line


def ok(subject: str, message: str) -> Finding:
    """Looked at, and good."""
    return Finding(Level.OK, subject, message)


def warning(subject: str, message: str, fix: str) -> Finding:
    """The run starts, but not as the recipe means it."""
    return Finding(Level.WARNING, subject, message, fix)


def error(subject: str, message: str, fix: str) -> Finding:
    """The run cannot work."""
    return Finding(Level.ERROR, subject, message, fix)


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size(nbytes: float) -> str:
    """``1.2 GiB``: bytes for people."""
    for unit, scale in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} bytes"

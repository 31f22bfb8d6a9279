"""Findings: the lines of the check report."""

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # the run starts, but not as intended
    ERROR = "error"  # the run cannot work


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. Any result that is not ok names its fix."""

    level: Level
    subject: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8}{self.subject}: {self.message}"
        return f"{line}\n        -> {self.fix}" if self.fix else line


def ok(subject: str, message: str) -> Finding:
    """Create a finding without a problem."""
    return Finding(Level.OK, subject, message)


def warning(subject: str, message: str, fix: str) -> Finding:
    """Create a finding for a run that starts, but not as the recipe intends."""
    return Finding(Level.WARNING, subject, message, fix)


def error(subject: str, message: str, fix: str) -> Finding:
    """Create a finding for a run that cannot work."""
    return Finding(Level.ERROR, subject, message, fix)


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size(nbytes: float) -> str:
    """Format bytes, such as ``1.2 GiB``."""
    for unit, scale in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} bytes"

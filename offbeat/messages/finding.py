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
    fix_in_python: str = ""  # if the fix in Python is a call, not a command

    def __str__(self) -> str:
        return self._with(self.fix)

    def in_python(self) -> str:
        """Return the text for a caller in Python. It names calls instead of commands."""
        return self._with(self.fix_in_python or self.fix)

    def _with(self, fix: str) -> str:
        line = f"{self.level:<8}{self.subject}: {self.message}"
        return f"{line}\n        -> {fix}" if fix else line


def ok(subject: str, message: str) -> Finding:
    """Create a finding without a problem."""
    return Finding(Level.OK, subject, message)


def warning(subject: str, message: str, fix: str, fix_in_python: str = "") -> Finding:
    """Create a finding for a run that starts, but not as the recipe intends."""
    return Finding(Level.WARNING, subject, message, fix, fix_in_python)


def error(subject: str, message: str, fix: str, fix_in_python: str = "") -> Finding:
    """Create a finding for a run that cannot work."""
    return Finding(Level.ERROR, subject, message, fix, fix_in_python)


_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size(nbytes: float) -> str:
    """Format bytes, such as ``1.2 GiB``."""
    for unit, scale in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} bytes"

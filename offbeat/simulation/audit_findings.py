"""Violations of invariants, and where they were found."""

from dataclasses import dataclass
from typing import Final

MOST_FINDINGS: Final = 10
"""Maximum number of violations kept per invariant: later ones follow from the first."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant. ``invariant`` is its short name, ``I1`` to ``I24``."""

    invariant: str
    message: str  # includes the values that contradict each other
    where: str  # index and class of the event or record, as in ``journal 17 Claimed``

    def __str__(self) -> str:
        return f"{self.invariant} broken at {self.where}: {self.message}"


class Findings:
    """Collects violations. The auditor continues after each; the first one shows the cause."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._counts: dict[str, int] = {}  # number by invariant
        self.source = ""  # journal | records
        self.index = 0
        self.current: object = None  # event or record being checked

    def add(self, invariant: str, message: str) -> None:
        """Report a violation by the current event or record."""
        count = self._counts[invariant] = self._counts.get(invariant, 0) + 1
        if count <= MOST_FINDINGS:
            where = f"{self.source} {self.index} {type(self.current).__name__}"
            self.violations.append(Violation(invariant, message, where))

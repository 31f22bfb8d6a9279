"""Defines the auditor's findings and their places."""

from dataclasses import dataclass
from typing import Final

MOST_FINDINGS: Final = 10
"""Kept of each invariant in one audit: what comes later follows from what came first."""


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant does not hold. ``invariant`` is its short name, ``I1`` to ``I17``."""

    invariant: str
    message: str  # with the values that contradict each other
    where: str  # ``journal 17 Claimed``: index and class of the event or record

    def __str__(self) -> str:
        return f"{self.invariant} broken at {self.where}: {self.message}"


class Findings:
    """Collects violations. The auditor goes on after each, so the first one names the cause."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._counts: dict[str, int] = {}  # by invariant
        self.source = ""  # journal | records
        self.index = 0
        self.current: object = None  # the event or record being looked at

    def add(self, invariant: str, message: str) -> None:
        """Something is wrong with the event or record being looked at."""
        count = self._counts[invariant] = self._counts.get(invariant, 0) + 1
        if count <= MOST_FINDINGS:
            where = f"{self.source} {self.index} {type(self.current).__name__}"
            self.violations.append(Violation(invariant, message, where))

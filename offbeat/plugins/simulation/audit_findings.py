"""Violations of invariants, and where they were found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

MOST_FINDINGS: Final = 10
"""Maximum number of violations kept per invariant: later ones follow from the first."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant. ``invariant`` is its short name, ``I1`` to ``I25``."""

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


class AuditTable:
    """Part of the auditor that reads some classes of events and records, each in order.

    A method named ``on_...`` reads the class that its parameter is annotated with.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings, self._add = findings, findings.add

    def list_readers(self) -> Iterator[tuple[type[Any], Callable[[Any], None]]]:
        """Yield each class that the table reads, and the method."""
        for name in dir(self):
            if name.startswith("on_"):
                method = getattr(self, name)
                yield next(iter(method.__annotations__.values())), method

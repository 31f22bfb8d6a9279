"""A ledger that keeps its own events, as a journal in memory would."""

from offbeat.controller.events import AnyEvent
from offbeat.controller.ledger import Ledger
from offbeat.controller.steps_after import steps_after


class RecordedLedger(Ledger):
    """A ledger whose rewinds find in the events so far what they undo."""

    def __init__(self) -> None:
        self.events = list[AnyEvent]()
        super().__init__(self.events.append)

    def rewound(self, to_version: int, reason: str = "rank_lost") -> list[int]:
        after = steps_after(to_version, reversed(self.events))
        return self.rewind(to_version, reason, after)

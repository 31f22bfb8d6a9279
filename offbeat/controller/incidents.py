"""Incidents of a run in words, for the terminal: a lost process, a rewind, a drop, an outage."""

from collections import deque
from typing import Final

from offbeat.controller.events import (
    AnyEvent,
    Dropped,
    DropReason,
    EngineLost,
    Retired,
    Rewound,
    StepRefused,
    TrainerReplaced,
    WorkerLost,
)
from offbeat.controller.outage import OutageBreaker
from offbeat.messages.groups import group_id
from offbeat.messages.text import printable
from offbeat.telemetry.status_file import IncidentLine

_KEPT: Final = 16
_LONGEST: Final = 300  # characters of a reason
KINDS: Final = frozenset(
    {EngineLost, WorkerLost, Retired, TrainerReplaced, Rewound, Dropped, StepRefused}
)
"""Types of events that may be incidents."""


class IncidentLog:
    """The newest incidents of this controller, numbered from 1."""

    def __init__(self) -> None:
        self._kept = deque[IncidentLine](maxlen=_KEPT)
        self._count = 0
        self._is_out = False

    @property
    def newest(self) -> tuple[IncidentLine, ...]:
        """Return the newest incidents, oldest first."""
        return tuple(self._kept)

    def add_event(self, event: AnyEvent, step: int) -> None:
        """Add an event of ``KINDS`` if a user wants to know about it. ``step`` is in progress."""
        if text := _describe(event):
            self._add(step, text)

    def observe_outage(self, outage: OutageBreaker, step: int) -> None:
        """Add the beginning and the end of an outage of the environment."""
        if outage.is_open is not self._is_out:
            self._is_out = outage.is_open
            self._add(step, outage.describe() or "the environment answers again")

    def _add(self, step: int, text: str) -> None:
        self._count += 1
        self._kept.append(IncidentLine(self._count, step, printable(text, longest=_LONGEST)))


def _describe(event: AnyEvent) -> str:
    """Describe an event, or return "" if it is not an incident."""
    match event:
        case EngineLost():
            text = f"{event.engine} was lost: {event.reason}"
        case WorkerLost():
            text = f"{event.worker} was lost: {event.reason}"
        case Retired():
            text = f"{event.engine} is retired: {event.reason}"
        case TrainerReplaced(found=True):
            text = "the run continues: a new trainer loads the newest checkpoint"
        case TrainerReplaced():
            text = f"the trainer was lost and is replaced: {event.reason}"
        case Rewound(rewinding_to=None):
            text = f"rewound to version {event.to_version}: {event.reason}"
        case StepRefused():
            text = f"step {event.step} was not applied: {event.reason}"
        case Dropped(reason=DropReason.DATA | DropReason.INFRASTRUCTURE | DropReason.STALE):
            text = f"{group_id(event.prompt_index)} was dropped: {event.label}"
        case _:
            text = ""
    return text

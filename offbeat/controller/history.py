"""Times and rates of all incarnations so far, from a run's journal."""

from typing import Final

import msgspec

from offbeat.controller.events import (
    Admitted,
    Claimed,
    Committed,
    Dispatched,
    Event,
    Opened,
    Returned,
    Served,
    StepApplied,
    StepIntent,
)
from offbeat.controller.run_costs import RunCosts

_OF_GROUPS: Final = frozenset({Admitted, Dispatched, Committed, Returned, Claimed, StepIntent})


class History(msgspec.Struct):
    """The fold of a journal's events into times and rates. Part of the journal's snapshots.

    Its size does not grow with the run. Times are those of the journal; the time between two
    incarnations is not counted. An event without a time adds neither time nor trained samples.
    """

    wall_s: float = 0.0
    """Seconds from the first to the last event of each incarnation, summed."""
    serving_s: float = 0.0
    """The part of ``wall_s`` since the first weights of each incarnation were served."""
    samples: int = 0
    """Valid samples trained in that time, also by steps that a rewind has undone."""
    masked_samples: int = 0
    """Masked samples of the groups trained in that time."""
    tokens: int = 0
    """Prompt and response tokens of the groups trained in that time."""
    first_step_s: float | None = None
    """``wall_s`` at the end of the first step."""
    resumes: int = 0
    """Incarnations that were started by another driver than the one before."""
    driver: str | None = None
    """The process that started the last incarnation; None before any."""
    serving: bool = False
    """Whether the last incarnation has served weights."""
    at_s: float = 0.0
    """The time of day of the last event."""
    tally: RunCosts = msgspec.field(default_factory=RunCosts)
    """The costs of all incarnations so far."""

    def take(self, event: Event) -> None:
        """Add the next event."""
        if isinstance(event, Opened):
            if self.driver not in {None, event.driver}:
                self.resumes += 1
                self.tally.forget_processes()
            self.driver, self.serving = event.driver, False
        else:
            spent_s = max(0.0, event.unix_s - self.at_s)
            self.wall_s += spent_s
            if self.serving:
                self.serving_s += spent_s
        self.at_s = event.unix_s
        if type(event) in _OF_GROUPS:  # most records: nothing below is about them
            return
        self.tally.take(event)
        if isinstance(event, Served):
            self.serving = True
        elif isinstance(event, StepApplied) and event.unix_s:
            self.samples += event.samples
            self.masked_samples += event.masked_samples
            self.tokens += event.tokens
            if self.first_step_s is None:
                self.first_step_s = self.wall_s

"""What a journal says of the lives so far: the measures of a run that outlive its controllers."""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from offbeat.controller.events import AnyEvent, Committed, Opened, Rewound, Served, StepApplied
from offbeat.messages.groups import Receipt
from offbeat.telemetry.standing import StandingSteps


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """An applied step, as the receipts of its groups tell it."""

    version: int  # it made
    receipts: tuple[Receipt, ...]

    @property
    def samples(self) -> int:
        return sum(receipt.samples for receipt in self.receipts)

    @property
    def tokens(self) -> int:
        return sum(receipt.tokens for receipt in self.receipts)

    def add_to(self, steps: StandingSteps) -> None:
        """It stands: nothing has undone it."""
        reward = statistics.fmean(reward for each in self.receipts for reward in each.rewards)
        spans = [spans for receipt in self.receipts for spans in receipt.version_spans]
        steps.add(self.version, reward, Counter(self.version - 1 - min(each)[0] for each in spans))


class History:
    """The fold of a journal's events, as far as figures go.

    Times are those of the journal; what passes between two lives counts for nobody. An event without
    a time adds neither time nor what was trained in it.
    """

    def __init__(self) -> None:
        self.steps = StandingSteps()
        self.wall_s = 0.0
        """From the first to the last event of each life, summed."""
        self.serving_s = 0.0
        """The part of it since the life's first weights were served."""
        self.samples = self.tokens = 0
        """Trained in that time, also by steps that a rewind has undone."""
        self.first_step_s: float | None = None
        """``wall_s`` at the end of the first step."""
        self.resumes = 0
        """Lives that another process started than the one before."""
        self._driver: str | None = None
        self._serving = False
        self._at_s = 0.0  # the last event
        self._receipts = dict[int, Receipt]()

    @classmethod
    def of(cls, events: Iterable[AnyEvent]) -> Self:
        """That of all these."""
        history = cls()
        for event in events:
            history.take(event)
        return history

    def take(self, event: AnyEvent) -> None:
        """The next event."""
        if isinstance(event, Opened):
            self.resumes += self._driver not in {None, event.driver}
            self._driver, self._serving = event.driver, False
        else:
            spent_s = max(0.0, event.unix_s - self._at_s)
            self.wall_s += spent_s
            self.serving_s += spent_s * self._serving
        self._at_s = event.unix_s
        match event:
            case Served():
                self._serving = True
            case Committed():
                self._receipts[event.receipt.ordinal] = event.receipt
            case StepApplied():
                self._applied(event)
            case Rewound():
                self.steps.undo_after(event.to_version)
            case _:
                pass

    def _applied(self, event: StepApplied) -> None:
        receipts = tuple(self._receipts.pop(ordinal) for ordinal in event.ordinals)
        step = TrainedStep(event.version, receipts)
        step.add_to(self.steps)
        if event.unix_s:
            self.samples += step.samples
            self.tokens += step.tokens
            if self.first_step_s is None:
                self.first_step_s = self.wall_s

"""How the run goes, for people: the figures behind the display, the summary and the busy metrics."""

import asyncio
from collections import Counter, deque
from typing import Final

from offbeat.controller.measures import StepMeasures
from offbeat.controller.state import RunState

WINDOW: Final = 20  # steps averaged for the first and the last reward


class Progress:
    """Reads the state and the measures of each step; decides nothing."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.rewards_first = list[float]()
        self.rewards_last = deque[float](maxlen=WINDOW)
        self.staleness = Counter[int]()  # samples trained, by versions behind
        self.samples = 0
        self.tokens = 0
        self.started_at = self.ended_at = 0.0
        self.first_step_s: float | None = None  # from start to the end of step 1

    def started(self) -> None:
        self.started_at = self.ended_at = asyncio.get_running_loop().time()

    def ended(self) -> None:
        self.ended_at = asyncio.get_running_loop().time()

    def step_done(self, measures: StepMeasures) -> None:
        """Take in one step, its weight sync included."""
        now = asyncio.get_running_loop().time()
        if self.first_step_s is None:
            self.first_step_s = now - self.started_at
        reward = measures.reward_mean
        if len(self.rewards_first) < WINDOW:
            self.rewards_first.append(reward)
        self.rewards_last.append(reward)
        if measures.result.applied:
            self.staleness += measures.staleness
        self.samples += sum(receipt.samples for receipt in measures.receipts)
        self.tokens += sum(receipt.tokens for receipt in measures.receipts)

    def busy_metrics(self) -> dict[str, float]:
        return {}

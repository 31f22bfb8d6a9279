"""A circuit breaker for failures of the environment. Pure: the caller brings the time.

Waits double with each failure, up to a bound; ``backoff_s`` computes them for trials and retries::

    wait(k) = min(W, w * 2 ** (k - 1))

    open      f >= F
    trial     one at a time, each wait(t + 1) or more after the failure before it
    retry     of a group wait(r) * u after its failure, no earlier than the trial while open

    w, W   ``rollout.backoff_s`` and ``rollout.backoff_max_s``, in seconds
    F      ``rollout.outage_failures``
    f      failures of the environment in a row, over all groups. An answered rollout makes it 0,
           a failure that may cost a prompt its last retry raises it to F
    t      trials that had failed before that failure, since the breaker opened
    r      failures of that group, of the kind that is retried
    u      jitter, uniform in 0.5 to 1, so that groups do not return together
"""

import math
from typing import Final

from offbeat.config.sections.rollout import RolloutConfig
from offbeat.messages.text import printable

_SHOWN: Final = 300  # characters of a failure
_MAX_DOUBLINGS: Final = 64
"""Exceeds any bound of a wait, and is far from the largest float."""


def backoff_s(limits: RolloutConfig, failures: int) -> float:
    """Return the seconds to wait after so many failures (from 1): the module's ``wait(k)``."""
    doublings = min(failures - 1, _MAX_DOUBLINGS)
    return min(limits.backoff_max_s, limits.backoff_s * math.pow(2, doublings))


class OutageBreaker:
    """Recognises an outage of the environment: failures in a row, over all groups.

    While the breaker is open, one group at a time is tried, with growing waits. The first answered
    rollout closes the breaker. A failed trial does not show whether its prompt is at fault, so it
    costs the prompt no retry. Otherwise an outage of one minute would cost each tried prompt a
    retry.
    """

    def __init__(self, limits: RolloutConfig) -> None:
        self._limits = limits
        self._failures_in_row = 0
        self.trials = 0
        """Failed trials since it opened."""
        self._problem = ""
        self._is_trying = False
        self._not_before = 0.0  # event loop's clock

    @property
    def is_open(self) -> bool:
        """Return whether the environment is considered out of service."""
        return self._failures_in_row >= self._limits.outage_failures

    def describe(self) -> str:
        """Describe the outage in a few words while it is open. Return "" while it is closed."""
        if not self.is_open:
            return ""
        return (
            f"the environment, which failed {self._failures_in_row} times in a row: one group at a "
            f"time is tried ({self.trials} so far). The last failure: {self._problem}"
        )

    def answered(self) -> None:
        """Record that a rollout was completed: the breaker closes."""
        self._failures_in_row = self.trials = 0
        self._is_trying, self._not_before = False, 0.0

    def failed(
        self,
        now: float,
        problem: str,
        *,
        spends_last_retry: bool = False,
        is_first_suspect: bool = False,
    ) -> bool:
        """Record a failure of the environment. Return whether it costs the prompt a retry.

        While the breaker is open, no failure costs a retry: neither that of a trial nor that of a
        rollout dispatched before. The last retry of a prompt is also spared if no rollout was
        answered since the previous failure, or if this prompt may be the first to see an outage.
        Engines may have spent its other retries, and if few groups are in flight, perhaps no other
        group sees the outage. In these cases the breaker opens at once, and other groups are tried
        before that prompt is dropped.

        Args:
            now: The event loop's time, in seconds.
            problem: Text of the failure, shown to people who wait.
            spends_last_retry: Whether the prompt is dropped if this failure costs a retry.
            is_first_suspect: Whether a single failure of this prompt may count as an outage.
        """
        was_open, self._problem = self.is_open, printable(problem, longest=_SHOWN)
        if was_open and not self._is_trying:
            return False
        self._failures_in_row += 1
        is_suspected = spends_last_retry and (is_first_suspect or self._failures_in_row > 1)
        if is_suspected:
            self._failures_in_row = max(self._failures_in_row, self._limits.outage_failures)
        if self.is_open:
            self._not_before = now + backoff_s(self._limits, self.trials + 1)
            self.trials += was_open
            self._is_trying = False
        return not (was_open or is_suspected)

    def dispatched(self) -> None:
        """Record that a group was dispatched. While the breaker is open, it is the trial."""
        self._is_trying = self.is_open

    def returned(self) -> None:
        """Record that a group returned for a reason unrelated to the environment."""
        self._is_trying = False

    def may_dispatch(self, now: float) -> bool:
        """Return whether one more group may be dispatched."""
        return not self.is_open or (not self._is_trying and now >= self._not_before)

    def remaining_s(self, now: float) -> float:
        """Return the seconds until the next trial, or 0 while the breaker is closed."""
        return max(0.0, self._not_before - now) if self.is_open else 0.0

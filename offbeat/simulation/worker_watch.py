"""Watches a worker's process for a simulated controller: by replies, and by calls that fail."""

from collections.abc import Callable

from offbeat.simulation.network import Report

OnWorker = Callable[[str, str], None]
"""Receives the name of a worker, and its process or why that is lost."""


class WorkerWatch:
    """Tracks one worker for its caller; stands in for ``RayWorker``, without its probes.

    A reply shows that a process is back only if its call was made after the loss: an earlier one
    may be the late reply of the process that died.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reported = set[str]()  # processes that have replied
        self._losses, self._is_lost = 0, False
        self.on_joined: OnWorker = lambda name, process: None  # noqa: ARG005 - nobody counts
        self.on_lost: OnWorker = lambda name, reason: None  # noqa: ARG005 - as above
        self.on_reward_calls: Callable[[str, int], None] = lambda process, calls: None  # noqa: ARG005

    def answered_since(self) -> Callable[[Report], None]:
        """Return the callback for the reply to a call that is made at this moment."""
        losses = self._losses

        def answered(report: Report) -> None:
            process, reward_calls = report
            if process not in self._reported or (self._is_lost and losses == self._losses):
                self._reported.add(process)
                self._is_lost = False
                self.on_joined(self._name, process)
            self.on_reward_calls(process, reward_calls)

        return answered

    def lost(self, reason: str) -> None:
        """Report a process whose call failed as lost, once until one is back."""
        if not self._is_lost:
            self._losses, self._is_lost = self._losses + 1, True
            self.on_lost(self._name, reason)

"""Reports about environment workers, and the functions that receive these reports."""

from collections.abc import Callable

import msgspec


class WorkerReport(msgspec.Struct, frozen=True):
    """Report of a worker that accompanies every reply: its process, and the work since its start.

    Counts are cumulative, so a lost, late or repeated report changes no sum.
    """

    incarnation: str
    reward_calls: int = 0  # calls of reward functions, including retries
    cpu_s: float = 0.0
    """CPU seconds of the process, or of the thread if other components share the process.

    Child processes, such as rewards and agents, are not counted.
    """


OnJoined = Callable[[str, str], None]
"""Receives the names of worker and process at its first reply, and at the first after a loss."""
OnLost = Callable[[str, str], None]
"""Receives a worker's name and why its process is lost. Not called again before it is back."""
OnReport = Callable[[WorkerReport], None]
"""Receives each report of a worker."""

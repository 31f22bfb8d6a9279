"""Reports about environment workers, and the functions that receive them."""

from collections.abc import Callable

import msgspec


class WorkerReport(msgspec.Struct, frozen=True):
    """Report of a worker that goes with every reply: its process, and the work since its start.

    Counts are cumulative: a report that is lost, late or repeated changes no sum.
    """

    incarnation: str
    reward_calls: int = 0  # of reward functions, their tries included
    cpu_s: float = 0.0
    """CPU seconds of the process, or of the thread if other components share the process.

    Child processes, such as rewards and agents, are not counted.
    """


OnJoined = Callable[[str, str], None]
"""Receives the names of a worker and of its process at its first reply, and its first after a loss."""
OnLost = Callable[[str, str], None]
"""Receives the name of a worker and why its process is lost; again only once it was back."""
OnReport = Callable[[WorkerReport], None]
"""Receives each report of a worker."""

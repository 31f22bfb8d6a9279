"""Report of an environment worker about itself, which goes with every reply."""

import msgspec


class WorkerReport(msgspec.Struct, frozen=True):
    """Name of the worker's process, and what it has done since it started.

    Counts are cumulative: a report that is lost, late or repeated changes no sum.
    """

    incarnation: str
    reward_calls: int = 0  # of reward functions, their tries included
    # Of this process, or of the worker's thread if other components share its process; without its
    # children: rewards and agents
    cpu_s: float = 0.0

"""Report of an environment worker about itself, which goes with every reply."""

import msgspec


class WorkerReport(msgspec.Struct, frozen=True):
    """Name of the worker's process, and the calls that it has made since it started.

    The count is cumulative: a report that is lost, late or repeated changes no sum.
    """

    incarnation: str
    reward_calls: int = 0  # of reward functions, their tries included

"""The number of files that a process may have open, which connections of agents count as."""

import resource
from typing import Final

from offbeat.messages.failures import OffbeatError

_OTHERS: Final = 512
"""Descriptors of a worker besides connections of agents: its processes, Ray, files."""


class TooFewDescriptors(OffbeatError):
    """The operating system does not allow a worker as many open files as its episodes need."""

    episodes: int
    needed: int
    limit: int

    def __str__(self) -> str:
        return (
            f"{self.episodes} episodes at once need {self.needed} open files in their environment "
            f"worker; the hard limit is {self.limit}. Raise it (ulimit -Hn), or lower "
            "environment.episodes_per_child or environment.reward_workers"
        )


def raise_descriptor_limit(episodes: int) -> None:
    """Raise the soft limit of open files to what so many episodes need, a connection for each.

    Raises:
        TooFewDescriptors: The hard limit is lower.
    """
    needed = episodes + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise TooFewDescriptors(episodes, needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

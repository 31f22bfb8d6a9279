"""The number of files that a process may have open, which connections of agents count as."""

import resource
import sys
from typing import Final

from offbeat.messages.failures import OffbeatError

_OTHERS: Final = 512
"""Descriptors of a worker besides connections of agents: its processes, Ray, files."""

_PER_EPISODE: Final = 16
"""Connections of an episode, of which each may have a request open."""

_FEWEST: Final = 256
"""Connections for few episodes: their clients keep some that they do not use."""


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


def raise_descriptor_limit(episodes: int) -> int:
    """Raise the soft limit of open files to what so many episodes need; return the connections that fit.

    A connection for each is needed; as many as each may have open are taken where the hard limit
    allows them.

    Raises:
        TooFewDescriptors: The hard limit is lower.
    """
    needed, most = episodes + _OTHERS, max(_FEWEST, episodes * _PER_EPISODE)
    soft, hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if hard < needed:
        raise TooFewDescriptors(episodes, needed, hard)
    allowed = max(soft, min(hard, most + _OTHERS))
    if allowed > soft:
        _, unchanged = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, unchanged))
    return min(most, allowed - _OTHERS)

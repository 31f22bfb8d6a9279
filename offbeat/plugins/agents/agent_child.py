"""Runs an agent: ``python -m offbeat.plugins.agents.agent_child FD PID MARK_FD``.

It is a reward child (``reward_child``) that plays many episodes at once. ``MARK_FD`` is the file of an
``EpisodeMark``.
"""

import asyncio
import os
import sys

import msgspec

from offbeat.environments.child_setup import (
    import_function,
    limit_memory,
    open_channel,
    receive,
    restrict_to_this_process,
)
from offbeat.environments.frames import Ready, RewardTarget, framed
from offbeat.plugins.agents.agent_call import agent_as_reward
from offbeat.plugins.agents.episode_mark import EpisodeMark
from offbeat.plugins.agents.episode_serving import serve_episodes


def main() -> None:
    """Play episodes until the parent closes the socket."""
    parent_fd, parent_pid, mark_fd = map(int, sys.argv[1:])
    channel = open_channel(parent_fd, parent_pid)
    target = receive(channel.makefile("rb"), RewardTarget)
    if target is None:
        return
    mark = EpisodeMark(mark_fd)
    os.close(mark_fd)
    limit_memory(target)

    def send(message: msgspec.Struct) -> None:
        channel.sendall(framed(message))

    agent = import_function(target, send, agent_as_reward)
    if agent is None:
        return
    send(Ready(concurrent=True))
    asyncio.run(serve_episodes(agent, channel, mark, target.working_dir, restrict_to_this_process))


if __name__ == "__main__":
    main()

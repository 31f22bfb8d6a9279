"""Serves episodes of an agent in a child process: many at once, on one event loop.

Each episode is one call, which the parent may cancel; its end is always reported. The tasks of an
episode that are left running end with it, and no task of another one does.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from offbeat.environments.episode_mark import EpisodeMark
from offbeat.environments.episode_tasks import EpisodeTasks
from offbeat.environments.frames import CancelCall, RewardCall, RewardReply, framed
from offbeat.environments.reward_replies import reply_to_raise, reply_with, row_of
from offbeat.messages.framing import LENGTH, body_length

_FROM_PARENT = msgspec.json.Decoder(RewardCall | CancelCall)


async def serve_episodes(
    agent: Callable[..., Awaitable[object]],
    channel: socket.socket,
    mark: EpisodeMark,
    working_dir: Path,
    send_through: Callable[[Callable[[msgspec.Struct], None]], Callable[[msgspec.Struct], None]],
) -> None:
    """Play episodes until the parent closes the socket.

    ``send_through`` wraps the function that sends a message.
    """
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    send = send_through(lambda message: writer.write(framed(message)))
    tasks = EpisodeTasks(mark)
    loop = asyncio.get_running_loop()
    loop.set_task_factory(tasks)
    running: dict[int, asyncio.Task[None]] = {}
    cancelled = set[int]()

    async def play(call: RewardCall) -> None:
        reply = RewardReply(call.number, 0, None, "cancelled", "the parent cancelled the episode")
        try:
            reply = reply_with(call, 0, await agent(row_of(call), call.responses[0]))
        except asyncio.CancelledError as error:
            if call.number not in cancelled:  # the agent cancelled itself
                reply = reply_to_raise(call, 0, error, working_dir)
        except BaseException as error:  # noqa: BLE001 - whatever user code raises, the reply says it
            reply = reply_to_raise(call, 0, error, working_dir)
        finally:
            try:
                await tasks.end(call.number)
            finally:
                del running[call.number]
                cancelled.discard(call.number)
                send(reply)

    while (message := await _received(reader)) is not None:
        match message:
            case RewardCall():
                running[message.number] = tasks.begin(message.number, play(message))
            case CancelCall():
                if (episode := running.get(message.number)) is not None:
                    cancelled.add(message.number)
                    loop.call_soon(episode.cancel)  # behind its first step: a reply is due


async def _received(reader: asyncio.StreamReader) -> RewardCall | CancelCall | None:
    """Return the next message; None when the parent has closed the socket."""
    try:
        header = await reader.readexactly(LENGTH.size)
        return _FROM_PARENT.decode(await reader.readexactly(body_length(header)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None

"""Serves episodes of an agent in a child process: many at once, on one event loop.

Each episode is one call: its row is the task, its one response an ``AgentClient``. The parent may cancel
a call with ``CancelCall``; its end is always reported. The tasks of an episode that are left running end
with it, and no task of another one does.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakSet

import msgspec

from offbeat.environments.child_setup import Send
from offbeat.environments.exits import ContainedCoroutine
from offbeat.environments.frames import RewardCall, RewardReply, framed
from offbeat.environments.reward_replies import reply_to_raise, reply_with, row_of
from offbeat.environments.reward_value import BadReward
from offbeat.messages.framing import LENGTH, body_length
from offbeat.plugins.agents.episode_mark import EpisodeMark

T = TypeVar("T")
_NONE: Final = 0
_EPISODE: ContextVar[int] = ContextVar("episode", default=_NONE)


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """Request to end an episode, which is replied to as at any other end."""

    number: int


class EpisodeTasks:
    """Task factory of an event loop: a task belongs to the episode of the task that created it.

    While a task of an episode executes, the mark has the number of the episode. An exception that
    would end the process, such as ``SystemExit``, fails the task with ``ExitRaised``.
    """

    def __init__(self, mark: EpisodeMark) -> None:
        self._mark = mark
        self._tasks: dict[int, WeakSet[asyncio.Task[Any]]] = {}

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Any,  # noqa: ANN401 - a coroutine, or what a generator makes of one
        **options: Any,  # noqa: ANN401 - those of asyncio
    ) -> "asyncio.Task[Any]":
        context = options.get("context")
        number = _EPISODE.get() if context is None else context.get(_EPISODE, _NONE)
        if number != _NONE:
            coroutine = _Marked(coroutine, self._mark, number)
        task = asyncio.Task(coroutine, loop=loop, **options)
        if number in self._tasks:
            self._tasks[number].add(task)
        return task

    def begin(self, number: int, episode: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Return the first task of an episode. Numbers begin with 1."""
        context = copy_context()
        context.run(_EPISODE.set, number)
        self._tasks[number] = WeakSet()
        loop = asyncio.get_running_loop()
        return loop.create_task(episode, name=f"episode-{number}", context=context)

    async def end(self, number: int) -> None:
        """Cancel the tasks that the episode has left running, other than the current one."""
        left = self._tasks.pop(number) - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class _Marked(ContainedCoroutine[T]):
    """A contained coroutine that marks its episode while it executes."""

    def __init__(self, inner: Coroutine[Any, Any, T], mark: EpisodeMark, number: int) -> None:
        super().__init__(inner)
        self._mark, self._number = mark, number

    @contextmanager
    def _executing(self) -> Generator[None]:
        self._mark.number = self._number
        try:
            with super()._executing():
                yield
        finally:
            self._mark.number = _NONE


_FROM_PARENT = msgspec.json.Decoder(RewardCall | CancelCall)


async def serve_episodes(
    agent: Callable[..., Awaitable[object]],
    channel: socket.socket,
    mark: EpisodeMark,
    working_dir: Path,
    send_through: Callable[[Send], Send],
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
        reply = RewardReply(call.number, 0, problem=BadReward("cancelled", "by the parent"))
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

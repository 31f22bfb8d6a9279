"""Runs a reward function or agent: ``python -m offbeat.environments.reward_child FD PID MARK_FD``.

It communicates over the socket ``FD`` only, so that prints of user code cannot disturb the
protocol; both of its standard streams go to the worker's standard error. Its address space is
limited, and it dies with the process ``PID`` that started it. ``MARK_FD`` is the file of an ``EpisodeMark``.
"""

import asyncio
import inspect
import os
import resource
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from offbeat.config.by_value import unpack
from offbeat.config.user_code import TargetNotFound, describe, load_target
from offbeat.environments.async_calls import AsyncCalls
from offbeat.environments.episode_mark import EpisodeMark
from offbeat.environments.frames import (
    Ready,
    Refused,
    RewardCall,
    RewardTarget,
    TryBegun,
    framed,
)
from offbeat.environments.inputs import ENVIRONMENT, InputChanged, source_digest
from offbeat.environments.reward_replies import reply_to_raise, reply_with, row_of
from offbeat.messages.framing import LENGTH, body_length
from offbeat.messages.parent_death import die_with_parent

_Send = Callable[[msgspec.Struct], None]
_Message = TypeVar("_Message")


def main() -> None:
    """Serve calls until the parent closes the socket."""
    parent_fd, parent_pid, mark_fd = map(int, sys.argv[1:])
    die_with_parent(parent_pid)  # elsewhere an idle child ends at the end of the socket
    # A process that user code starts must not keep the socket open.
    os.set_inheritable(parent_fd, False)  # noqa: FBT003 - its parameter has no name
    channel = socket.socket(fileno=parent_fd)
    frames = channel.makefile("rb")
    target = _receive(frames, RewardTarget)
    if target is None:
        return
    mark = EpisodeMark(mark_fd)
    os.close(mark_fd)
    limit = target.memory_mib << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _serve(target, channel, frames, mark)


def _serve(
    target: RewardTarget, channel: socket.socket, frames: BinaryIO, mark: EpisodeMark
) -> None:
    def send(message: msgspec.Struct) -> None:
        channel.sendall(framed(message))

    working_dir = target.working_dir
    try:
        reward = partial(_function_of(target), **target.options)
    except TargetNotFound as error:
        send(Refused(str(error)))
        return
    source = source_digest(target.target, working_dir)  # digest of what has just been imported
    if target.source and source is not None and source != target.source:
        send(Refused(str(InputChanged(ENVIRONMENT, target.target))))
        return
    concurrent = inspect.iscoroutinefunction(reward.func)
    reply = _of_this_process(send)
    announce = partial(reply, TryBegun())
    limits = target.limits
    at_once = AsyncCalls(reward, limits, announce).call if concurrent and limits else reward
    send(Ready(concurrent))
    if target.episodes is not None:
        from offbeat.environments.episode_serving import serve_episodes  # noqa: PLC0415 - agents

        asyncio.run(serve_episodes(reward, channel, mark, working_dir, _of_this_process))
        return
    with asyncio.Runner() as runner:
        while (call := _receive(frames, RewardCall)) is not None:
            if concurrent:
                runner.run(_answer_at_once(at_once, call, working_dir, reply))
            else:
                _answer_in_turn(reward, call, working_dir, reply)


def _function_of(target: RewardTarget) -> Callable[..., Any]:
    """Import the target.

    Raises:
        TargetNotFound: For any failure; also of an agent that is not async.
    """
    if target.value is not None:
        try:
            unpack([target.value])
        except BaseException as error:  # it imports modules of the user
            problem = describe(error, target.working_dir)
            raise TargetNotFound(target.target, str(target.working_dir), problem) from error
    function = load_target(target.target, target.working_dir)
    if target.episodes is None:
        return function
    from offbeat.environments.agent_call import agent_as_reward  # noqa: PLC0415 - imports numpy

    try:
        return agent_as_reward(function)
    except TypeError as error:
        raise TargetNotFound(target.target, str(target.working_dir), str(error)) from error


def _of_this_process(send: _Send) -> _Send:
    """Return ``send`` restricted to this process: a fork of user code exits instead of sending.

    The fork inherits the socket, and would return from user code as if it were this process.
    """
    own_pid = os.getpid()

    def sent(message: msgspec.Struct) -> None:
        if os.getpid() != own_pid:
            os._exit(0)
        send(message)

    return sent


def _answer_in_turn(
    reward: Callable[..., object], call: RewardCall, working_dir: Path, send: _Send
) -> None:
    """Answer sample by sample: each reply shows the parent that the next call has begun."""
    for sample, response in enumerate(call.responses):
        try:
            value = reward(row_of(call), response)
        except BaseException as error:  # noqa: BLE001 - whatever user code raises, the answer says it
            send(reply_to_raise(call, sample, error, working_dir))
        else:
            send(reply_with(call, sample, value))


async def _answer_at_once(
    reward: Callable[..., Any], call: RewardCall, working_dir: Path, send: _Send
) -> None:
    async def answer(sample: int, response: str) -> None:
        try:
            value = await reward(row_of(call), response)
        except asyncio.CancelledError as error:
            running = asyncio.current_task()
            if running is None or running.cancelling():
                raise
            send(reply_to_raise(call, sample, error, working_dir))
        except BaseException as error:  # noqa: BLE001 - as above
            send(reply_to_raise(call, sample, error, working_dir))
        else:
            send(reply_with(call, sample, value))

    async with asyncio.TaskGroup() as samples:
        for sample, response in enumerate(call.responses):
            samples.create_task(answer(sample, response), name=f"reward-{sample}")


def _receive(frames: BinaryIO, kind: type[_Message]) -> _Message | None:
    """The next message; None when the parent has closed the socket."""
    header = frames.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    body = frames.read(body_length(header))
    return msgspec.json.decode(body, type=kind, dec_hook=lambda kind, path: kind(path))


if __name__ == "__main__":
    main()

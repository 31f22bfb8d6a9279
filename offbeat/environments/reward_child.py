"""Runs a user's reward function or agent: ``python -m offbeat.environments.reward_child FD PID``.

It communicates over the socket ``FD`` alone, so that prints of user code cannot disturb the
protocol; both of its standard streams go to the worker's standard error. Its address space is
limited, and it dies with the process ``PID`` that started it.
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

from offbeat.config.user_code import TargetNotFound, describe, load_target
from offbeat.environments.async_calls import AsyncCalls
from offbeat.environments.frames import (
    Hello,
    Ready,
    Refused,
    RewardCall,
    RewardReply,
    framed,
)
from offbeat.environments.inputs import ENVIRONMENT, InputChanged, source_digest
from offbeat.environments.reward_value import BadReward, NamedRewards, reward_of
from offbeat.messages.framing import LENGTH, body_length
from offbeat.messages.parent_death import die_with_parent

_Send = Callable[[msgspec.Struct], None]
_Message = TypeVar("_Message", bound=msgspec.Struct)


def main() -> None:
    """Serve calls until the parent closes the socket."""
    parent_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)  # elsewhere an idle child ends at the end of the socket
    # A process that user code starts must not keep the socket open.
    os.set_inheritable(parent_fd, False)  # noqa: FBT003 - its parameter has no name
    channel = socket.socket(fileno=parent_fd)
    frames = channel.makefile("rb")
    hello = _receive(frames, Hello)
    if hello is None:
        return
    _limit_memory(hello.memory_mib)
    _serve(hello, frames, lambda message: channel.sendall(framed(message)))


def _serve(hello: Hello, frames: BinaryIO, send: _Send) -> None:
    working_dir = Path(hello.working_dir)
    try:
        reward = partial(_function_of(hello, working_dir), **hello.options)
    except TargetNotFound as error:
        send(Refused(str(error)))
        return
    source = source_digest(hello.target, working_dir)  # digest of what has just been imported
    if hello.source and source is not None and source != hello.source:
        send(Refused(str(InputChanged(ENVIRONMENT, hello.target))))
        return
    concurrent = inspect.iscoroutinefunction(reward.func)
    at_once = AsyncCalls(reward, hello.limits).call if concurrent and hello.limits else reward
    send = _of_this_process(send)
    send(Ready(concurrent))
    with asyncio.Runner() as runner:
        while (call := _receive(frames, RewardCall)) is not None:
            if concurrent:
                runner.run(_answer_at_once(at_once, call, working_dir, send))
            else:
                _answer_in_turn(reward, call, working_dir, send)


def _function_of(hello: Hello, working_dir: Path) -> Callable[..., Any]:
    """Import the target.

    Raises:
        TargetNotFound: For any failure; also of an agent that is not async.
    """
    function = load_target(hello.target, working_dir)
    if not hello.is_agent:
        return function
    from offbeat.environments.agent_call import agent_as_reward  # noqa: PLC0415 - imports numpy

    try:
        return agent_as_reward(function)
    except TypeError as error:
        raise TargetNotFound(hello.target, hello.working_dir, str(error)) from error


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
            value = reward(_row_of(call), response)
        except BaseException as error:  # noqa: BLE001 - whatever user code raises, the answer says it
            send(_raised(call, sample, error, working_dir))
        else:
            send(_answer(call, sample, value))


async def _answer_at_once(
    reward: Callable[..., Any], call: RewardCall, working_dir: Path, send: _Send
) -> None:
    async def answer(sample: int, response: str) -> None:
        try:
            value = await reward(_row_of(call), response)
        except asyncio.CancelledError as error:
            running = asyncio.current_task()
            if running is None or running.cancelling():
                raise
            send(_raised(call, sample, error, working_dir))
        except BaseException as error:  # noqa: BLE001 - as above
            send(_raised(call, sample, error, working_dir))
        else:
            send(_answer(call, sample, value))

    async with asyncio.TaskGroup() as samples:
        for sample, response in enumerate(call.responses):
            samples.create_task(answer(sample, response), name=f"reward-{sample}")


def _row_of(call: RewardCall) -> dict[str, Any]:
    """Return a copy of the row for one sample, so that the function's changes affect no other."""
    return msgspec.json.decode(call.prompt, type=dict[str, Any])


def _answer(call: RewardCall, sample: int, value: object) -> RewardReply:
    if isinstance(value, NamedRewards):
        return RewardReply(call.number, sample, value.reward, by_name=value.by_name)
    reward = value if isinstance(value, BadReward) else reward_of(value)
    if isinstance(reward, BadReward):
        return RewardReply(call.number, sample, None, reward.reason, reward.detail, reward.fault)
    return RewardReply(call.number, sample, reward)


def _raised(call: RewardCall, sample: int, error: BaseException, working_dir: Path) -> RewardReply:
    return RewardReply(call.number, sample, None, "reward_raised", describe(error, working_dir))


def _receive(frames: BinaryIO, kind: type[_Message]) -> _Message | None:
    """The next message; None when the parent has closed the socket."""
    header = frames.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return msgspec.json.decode(frames.read(body_length(header)), type=kind)


def _limit_memory(memory_mib: int) -> None:
    limit = memory_mib << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()

"""Runs a reward function: ``python -m offbeat.environments.reward_child FD PID``.

It communicates over the socket ``FD`` only, so that prints of user code cannot disturb the
protocol; both of its standard streams go to the worker's standard error. Its address space is
limited, and it dies with the process ``PID`` that started it.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from offbeat.environments.async_calls import AsyncCalls
from offbeat.environments.child_setup import (
    Send,
    describe_target,
    import_function,
    limit_memory,
    open_channel,
    receive,
    restrict_to_this_process,
)
from offbeat.environments.frames import RewardCall, RewardTarget, TryBegun, framed
from offbeat.environments.reward_replies import reply_to_raise, reply_with, row_of


def main() -> None:
    """Serve calls until the parent closes the socket."""
    channel = open_channel(*map(int, sys.argv[1:]))
    frames = channel.makefile("rb")
    target = receive(frames, RewardTarget)
    if target is None:
        return
    limit_memory(target)
    _serve(target, channel, frames)


def _serve(target: RewardTarget, channel: socket.socket, frames: BinaryIO) -> None:
    def send(message: msgspec.Struct) -> None:
        channel.sendall(framed(message))

    reward = import_function(target, send)
    if reward is None:
        return
    ready, working_dir = describe_target(reward.func), target.working_dir
    concurrent = ready.concurrent
    reply = restrict_to_this_process(send)
    announce = partial(reply, TryBegun())
    limits = target.limits
    at_once = AsyncCalls(reward, limits, announce).call if concurrent and limits else reward
    send(ready)
    with asyncio.Runner() as runner:
        while (call := receive(frames, RewardCall)) is not None:
            if concurrent:
                runner.run(_answer_at_once(at_once, call, working_dir, reply))
            else:
                _answer_in_turn(reward, call, working_dir, reply)


def _answer_in_turn(
    reward: Callable[..., object], call: RewardCall, working_dir: Path, send: Send
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
    reward: Callable[..., Any], call: RewardCall, working_dir: Path, send: Send
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


if __name__ == "__main__":
    main()

"""Starts a child process that runs user code, and builds its replies."""

import asyncio
import inspect
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

from offbeat.config.by_value import unpack
from offbeat.config.secrets import of_recipe
from offbeat.config.user_code import TargetNotFound, describe, format_traceback, load_target
from offbeat.environments.frames import (
    CallMark,
    Ready,
    Refused,
    RewardCall,
    RewardReply,
    RewardTarget,
    frame_message,
)
from offbeat.environments.inputs import ENVIRONMENT, InputChanged, source_digest
from offbeat.environments.reward_value import (
    BadReward,
    NamedRewards,
    parse_named_reward,
    parse_reward,
)
from offbeat.messages.framing import LENGTH, body_length
from offbeat.messages.parent_death import die_with_parent
from offbeat.messages.redaction import remember_secrets

Send = Callable[[msgspec.Struct], None]
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class ChildSide:
    """State of a child, as held in the child's own process, once the target is imported."""

    target: RewardTarget
    function: "partial[Any]"  # the target with its options
    ready: Ready  # as sent to the parent
    channel: socket.socket
    frames: BinaryIO  # on the channel
    mark: CallMark

    def send(self, message: msgspec.Struct) -> None:
        self.channel.sendall(frame_message(message))


def run_child(
    serve: Callable[[ChildSide], None],
    adapt: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> None:
    """Run this process as a child: ``python -m PROGRAM FD PID MARK_FD``.

    The child communicates only over the socket ``FD``, so prints of user code cannot disturb the
    protocol. Both of its standard streams go to the worker's standard error. Its address space is
    limited. It ends when the process ``PID`` that started it ends. ``MARK_FD`` is the file of a
    ``CallMark``.

    Args:
        serve: Serves calls until the parent closes the socket.
        adapt: Changes the form of the user's function.
    """
    parent_fd, parent_pid, mark_fd = map(int, sys.argv[1:])
    die_with_parent(parent_pid)  # on other systems an idle child ends when the socket closes
    # A process that user code starts must not keep the socket open.
    os.set_inheritable(parent_fd, False)  # noqa: FBT003 - its parameter has no name
    channel = socket.socket(fileno=parent_fd)
    frames = channel.makefile("rb")
    target = receive(frames, RewardTarget)
    if target is None:
        return
    remember_secrets(of_recipe(target.options))
    mark = CallMark(mark_fd)
    os.close(mark_fd)
    if target.memory_mib is not None:
        limit = target.memory_mib << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    function = _import(target, adapt)
    if isinstance(function, Refused):
        channel.sendall(frame_message(function))
        return
    ready = describe_target(function.func)
    channel.sendall(frame_message(ready))
    serve(ChildSide(target, function, ready, channel, frames, mark))


def receive(frames: BinaryIO, kind: type[_Message]) -> _Message | None:
    """Return the next message, or None if the parent has closed the socket."""
    header = frames.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    body = frames.read(body_length(header))
    return msgspec.json.decode(body, type=kind, dec_hook=lambda kind, path: kind(path))


def describe_target(target: Callable[..., Any]) -> Ready:
    """Return the facts about an imported target that its parent needs."""
    bases = target.__mro__ if isinstance(target, type) else ()
    is_async = inspect.iscoroutinefunction(target)
    return Ready(is_async, tuple(each.__name__ for each in bases))


def restrict_to_this_process(send: Send) -> Send:
    """Return ``send`` restricted to this process: a fork made by user code exits instead.

    The fork inherits the socket. Without this restriction, the fork would return from user code and
    reply in the name of this process.
    """
    own_pid = os.getpid()

    def sent(message: msgspec.Struct) -> None:
        if os.getpid() != own_pid:
            os._exit(0)
        send(message)

    return sent


def copy_row(call: RewardCall) -> dict[str, Any]:
    """Return a copy of the row for one sample, so that changes to it affect no other sample."""
    return msgspec.json.decode(call.prompt, type=dict[str, Any])


def reply_with(call: RewardCall, sample: int, value: object) -> RewardReply:
    """Return the reply for a value of user code, or for an error wrapped by ``make_bad_reward``."""
    if isinstance(value, Mapping):
        value = parse_named_reward(cast("Mapping[object, object]", value))
    elif not isinstance(value, NamedRewards | BadReward):
        value = parse_reward(value)
    match value:
        case BadReward():
            return RewardReply(call.number, sample, problem=value)
        case NamedRewards():
            return RewardReply(call.number, sample, value)
        case _:
            return RewardReply(call.number, sample, NamedRewards(cast("float", value), {}))


def make_bad_reward(error: BaseException, working_dir: Path) -> BadReward:
    """Return the ``BadReward`` of a sample for which user code raised."""
    return BadReward(
        "reward_raised", describe(error, working_dir), traceback=format_traceback(error)
    )


async def answer(
    function: Callable[..., Any],
    call: RewardCall,
    sample: int,
    working_dir: Path,
    *,
    is_cancelled: Callable[[], bool],
) -> RewardReply:
    """Return the reply for the value or error of an async function.

    Raises:
        asyncio.CancelledError: The call ``is_cancelled``. Otherwise user code has cancelled itself,
            and the sample fails.
    """
    try:
        return reply_with(call, sample, await function(copy_row(call), call.responses[sample]))
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        return reply_with(call, sample, make_bad_reward(error, working_dir))


def _import(
    target: RewardTarget, adapt: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> "partial[Any] | Refused":
    """Import the target and return it with its options, or ``Refused`` with the reason."""
    working_dir = target.working_dir
    try:
        function = partial(_import_function(target, adapt), **target.options)
    except TargetNotFound as error:
        return Refused(str(error), error.problem, error.fix)
    source = source_digest(target.target, working_dir)  # digest of the source just imported
    if target.source and source is not None and source != target.source:
        changed = str(InputChanged(ENVIRONMENT, target.target))
        return Refused(changed, changed, "")
    return function


def _import_function(
    target: RewardTarget, adapt: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Import the target.

    Raises:
        TargetNotFound: The import failed, or the function has the wrong form.
    """
    if target.value is not None:
        try:
            unpack([target.value])
        except BaseException as error:  # the import runs modules of the user
            problem = describe(error, target.working_dir)
            raise TargetNotFound(target.target, str(target.working_dir), problem) from error
    function = load_target(target.target, target.working_dir, target.form, target.options)
    return adapt(function)

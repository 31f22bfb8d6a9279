"""First steps of a child process that runs user code: its socket, its limits, its function."""

import inspect
import os
import resource
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, TypeVar

import msgspec

from offbeat.config.by_value import unpack
from offbeat.config.user_code import TargetNotFound, describe, load_target
from offbeat.environments.frames import Ready, Refused, RewardTarget
from offbeat.environments.inputs import ENVIRONMENT, InputChanged, source_digest
from offbeat.messages.framing import LENGTH, body_length
from offbeat.messages.parent_death import die_with_parent

Send = Callable[[msgspec.Struct], None]
_Message = TypeVar("_Message")


def open_channel(parent_fd: int, parent_pid: int) -> socket.socket:
    """Return the socket to the parent, with which this process dies."""
    die_with_parent(parent_pid)  # elsewhere an idle child ends at the end of the socket
    # A process that user code starts must not keep the socket open.
    os.set_inheritable(parent_fd, False)  # noqa: FBT003 - its parameter has no name
    return socket.socket(fileno=parent_fd)


def receive(frames: BinaryIO, kind: type[_Message]) -> _Message | None:
    """Return the next message, or None if the parent has closed the socket."""
    header = frames.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    body = frames.read(body_length(header))
    return msgspec.json.decode(body, type=kind, dec_hook=lambda kind, path: kind(path))


def limit_memory(target: RewardTarget) -> None:
    """Limit the address space of this process."""
    if target.memory_mib is not None:
        limit = target.memory_mib << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def import_function(
    target: RewardTarget,
    send: Send,
    adapt: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> "partial[Any] | None":
    """Import the target and return it with its options; or send why it is refused and return None.

    ``adapt`` changes the form of the function.
    """
    working_dir = target.working_dir
    try:
        function = partial(_function_of(target, adapt), **target.options)
    except TargetNotFound as error:
        send(Refused(str(error), error.problem, error.fix))
        return None
    source = source_digest(target.target, working_dir)  # digest of what has just been imported
    if target.source and source is not None and source != target.source:
        changed = str(InputChanged(ENVIRONMENT, target.target))
        send(Refused(changed, changed, ""))
        return None
    return function


def describe_target(target: Callable[..., Any]) -> Ready:
    """Return the facts about an imported target that its parent needs."""
    bases = target.__mro__ if isinstance(target, type) else ()
    is_async = inspect.iscoroutinefunction(target)
    return Ready(is_async, tuple(each.__name__ for each in bases))


def restrict_to_this_process(send: Send) -> Send:
    """Return ``send`` for this process only: a fork of user code exits instead of sending.

    The fork inherits the socket, and would return from user code as if it were this process.
    """
    own_pid = os.getpid()

    def sent(message: msgspec.Struct) -> None:
        if os.getpid() != own_pid:
            os._exit(0)
        send(message)

    return sent


def _function_of(
    target: RewardTarget, adapt: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Import the target.

    Raises:
        TargetNotFound: For any failure; also of a function of another form.
    """
    if target.value is not None:
        try:
            unpack([target.value])
        except BaseException as error:  # it imports modules of the user
            problem = describe(error, target.working_dir)
            raise TargetNotFound(target.target, str(target.working_dir), problem) from error
    function = load_target(target.target, target.working_dir, target.form, target.options)
    return adapt(function)

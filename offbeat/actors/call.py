"""Awaits remote calls: cancellation reaches the actor, and its errors are classified.

Also defines the type of Ray's actor handles in this package.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# Ray declares functions without the types of their parameters.

import asyncio
import re
from itertools import pairwise
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ObjectFetchTimedOutError,
    ObjectFreedError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)

from offbeat.messages.failures import ActorLost, ArgumentLost, OffbeatError, RemoteBug, StartFailed
from offbeat.messages.text import first_line, printable

_LOST = (
    RayActorError,
    ActorUnavailableError,
    WorkerCrashedError,
    ObjectLostError,
    OutOfMemoryError,
    TaskCancelledError,
)


T = TypeVar("T")
_OUT_OF_MEMORY: Final = (
    "Ray's memory monitor ended its process: its machine was short of memory. Fix: run fewer or smaller "
    "processes there, or raise RAY_memory_usage_threshold (0.95)"
)
_PID: Final = re.compile(r"^\s*pid: (\d+)", re.MULTILINE)
_EXIT: Final = re.compile(r"Worker exit type: (\w+) Worker exit detail: ([^.\n]+)")
_EXCEPTION: Final = re.compile(r"(\w+\.)*[A-Z]\w*(:|$)")


async def await_reply(ref: "ray.ObjectRef[T]", actor: str, during: str) -> T:
    """Await the value of a remote call.

    Cancelling this await also cancels the call in the actor, which would otherwise run to its end.

    Raises:
        ActorLost: The process has died or cannot be reached.
        ArgumentLost: The process is alive, but an object that the call refers to is lost.
        StartFailed: The actor's constructor raised.
        OffbeatError: A typed failure that the actor raised, as its own class.
        RemoteBug: Any other error of the actor.
    """
    try:
        return await ref
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except RayTaskError as error:  # first: it is also an instance of its cause's class
        raise find_cause(error, actor, during) from None
    except _LOST as error:
        raise lost(error, actor, during) from None
    except RayError as error:
        raise RemoteBug(actor, during, type(error).__name__, first_line(error)) from None


def find_cause(error: RayTaskError, actor: str, during: str) -> OffbeatError:
    """Return the typed failure inside a task error, or a ``RemoteBug`` with its details."""
    cause = error.cause
    if isinstance(cause, OffbeatError):
        return cause
    if isinstance(cause, ObjectLostError):  # raised in the callee, so the callee is alive
        return ArgumentLost(actor, during, _how_lost(cause), cause.object_ref_hex)
    if isinstance(cause, _LOST):
        return lost(cause, actor, during)
    lines = str(error).strip().splitlines()
    where = next((line.strip() for line in reversed(lines) if line.startswith("  File")), "")
    return RemoteBug(actor, during, type(cause).__name__, f"{first_line(cause)} {where}".strip())


def lost(error: RayError, actor: str, during: str) -> ActorLost | StartFailed:
    """Return the failure of a process that has died, or whose constructor raised."""
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return StartFailed(actor, find_raised_line(error))
    return ActorLost(actor, during, _cause_of_death(error))


def _cause_of_death(error: BaseException) -> str:
    """Return why a process died, in one line.

    Ray's message contains it far below its first line.
    """
    if isinstance(error, OutOfMemoryError):
        return _OUT_OF_MEMORY
    if isinstance(error, ActorUnavailableError):
        return "its process was killed or crashed, or the network to it is cut"
    text = str(error)
    if not (ended := _EXIT.search(text)):
        return first_line(error)
    pid = _PID.search(text)
    who = f"its process {pid.group(1)}" if pid else "its process"
    return f"{who} was killed or crashed ({ended.group(1)}: {ended.group(2)})"


def _how_lost(error: ObjectLostError) -> str:
    """Return why an object is lost, in one line."""
    if isinstance(error, OwnerDiedError):
        return "the process that owned it died"
    if isinstance(error, ObjectFreedError):
        return "it was freed"
    if isinstance(error, ObjectFetchTimedOutError):
        return "the machine that holds it cannot be reached"
    return "the machine that held it died or cannot be reached"


def find_raised_line(error: BaseException) -> str:
    """Return the last line of a traceback that names an exception."""
    lines = [" ", *str(error).splitlines()]
    named = [
        line
        for above, line in pairwise(lines)
        if above[:1].isspace() and _EXCEPTION.match(line)  # below the code that raised it
    ]
    return printable(named[-1]) if named else first_line(error)


Handle = Any
"""Actor handle with the methods of its class. Ray's own types do not describe a class that becomes
an actor by ``ray.remote(cls)``."""

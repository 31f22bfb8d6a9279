# pyright: basic
# Ray is not fully typed.
"""Client's end of Ray calls, for clients that are not on the service's node."""

import asyncio
import itertools
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from offbeat.messages.failures import ActorLost, DeadlineExceeded, OffbeatError
from offbeat.queue_service import wire
from offbeat.queue_service.errors import ClientClosed
from offbeat.queue_service.storage.arenas import Slot
from offbeat.queue_service.wire import Attach, Reply, WireCall

T = TypeVar("T")


def got(ref: "ray.ObjectRef[T]", queue: str, during: str, within_s: float) -> T:
    """Return the result of a Ray call, blocking.

    Raises:
        ActorLost: The actor has died.
        DeadlineExceeded: No reply in time; the call is cancelled.
        OffbeatError: The error that the actor raised.
    """
    try:
        return ray.get(ref, timeout=within_s)
    except GetTimeoutError:
        ray.cancel(ref)
        raise DeadlineExceeded("a client", f"{during} of {queue}", within_s) from None
    except RayError as error:
        raise _typed(error, queue, during) from None


async def awaited(ref: "ray.ObjectRef[T]", queue: str, during: str, within_s: float) -> T:
    """Await a result like ``got``. Cancelling also cancels the call in the actor."""
    try:
        async with asyncio.timeout(within_s):
            return await ref
    except TimeoutError:
        ray.cancel(ref)
        raise DeadlineExceeded("a client", f"{during} of {queue}", within_s) from None
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except RayError as error:
        raise _typed(error, queue, during) from None


def _typed(error: RayError, queue: str, during: str) -> OffbeatError:
    if isinstance(error, RayTaskError) and isinstance(error.cause, OffbeatError):
        return error.cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ActorLost(queue, during, lines[0] if lines else type(error).__name__)


class RemoteMethod(Protocol):
    """Method of an actor handle."""

    def remote(self, *args: object) -> "ray.ObjectRef[Any]": ...


class RemoteQueue(Protocol):
    """Part of an actor handle that the links use."""

    @property
    def exchange(self) -> RemoteMethod: ...


class BlockingRayLink:
    """Blocking connection over Ray calls; see ``links.BlockingLink``."""

    def __init__(self, handle: RemoteQueue, queue: str, answer_s: float) -> None:
        self._handle, self._queue, self._answer_s = handle, queue, answer_s
        self._ids = itertools.count(1)
        self.closed = False
        self.client = ""
        self.client = wire.NAME.decode(self.exchange(Attach(None, maps=False), (), 0.0).value)

    def exchange(self, op: wire.Op, unpinned: tuple[Slot, ...], wait_s: float) -> Reply:
        during = type(op).__name__
        if self.closed:
            raise ClientClosed(self._queue, during)
        body = wire.encode(WireCall(next(self._ids), op, unpinned))
        ref = self._handle.exchange.remote(body, self.client)
        return wire.decode_reply(got(ref, self._queue, during, wait_s + self._answer_s))

    def close(self) -> None:
        self.closed = True


class LoopRayLink:
    """Connection over Ray calls for one event loop; see ``links.LoopLink``."""

    def __init__(self, handle: RemoteQueue, queue: str, answer_s: float) -> None:
        self._handle, self._queue, self._answer_s = handle, queue, answer_s
        self._ids = itertools.count(1)
        self.closed = False
        self.client = ""

    @classmethod
    async def connect(cls, handle: RemoteQueue, queue: str, answer_s: float) -> "LoopRayLink":
        link = cls(handle, queue, answer_s)
        link.client = wire.NAME.decode(
            (await link.exchange(Attach(None, maps=False), (), 0.0)).value
        )
        return link

    async def exchange(self, op: wire.Op, unpinned: tuple[Slot, ...], wait_s: float) -> Reply:
        during = type(op).__name__
        if self.closed:
            raise ClientClosed(self._queue, during)
        body = wire.encode(WireCall(next(self._ids), op, unpinned))
        ref = self._handle.exchange.remote(body, self.client)
        return wire.decode_reply(await awaited(ref, self._queue, during, wait_s + self._answer_s))

    def close(self) -> None:
        self.closed = True

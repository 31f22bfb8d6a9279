# pyright: basic
# ray is not fully typed.
"""The service as a Ray actor, and how Ray programs come to a client of it.

Clients on the actor's node speak to it through the Unix socket, and share memory with it. Clients
elsewhere send the same messages as Ray calls, with the payloads inside.
"""

import asyncio
from typing import Final, Protocol, cast

import ray

from offbeat.messages.failures import ActorLost
from offbeat.queue_service import ray_links, wire
from offbeat.queue_service.clients.asyncio_client import TransferQueueClient
from offbeat.queue_service.clients.blocking_client import SyncTransferQueueClient
from offbeat.queue_service.clients.times import ANSWER_S, START_S
from offbeat.queue_service.core.records import QueueLimits
from offbeat.queue_service.ray_links import RemoteMethod, RemoteQueue
from offbeat.queue_service.server.connections import Connection
from offbeat.queue_service.server.server import QueueServer

_CALLS_AT_A_TIME: Final = 10_000


class Handle(RemoteQueue, Protocol):
    """An actor of this class, from outside."""

    @property
    def where(self) -> RemoteMethod: ...


class TransferQueueActor:
    """A queue in a process of its own. Start it with ``start``; speak to it through a client."""

    def __init__(self, limits: QueueLimits, restore_from: str | None = None) -> None:
        self._house = QueueServer(limits, restore_from)
        self._visits: dict[str, tuple[Connection, dict[int, asyncio.Future[bytes]]]] = {}

    async def where(self) -> str:
        """The path of its socket, on its node; from here on it serves.

        Raises:
            SnapshotFailed: The snapshot it was to start from is none.
        """
        return await self._house.open()

    async def exchange(self, body: bytes, client: str = "") -> bytes:
        """One call of a client that cannot reach the socket."""
        await self._house.open()
        call = wire.decode_call(body)
        desk, (visit, waiting) = self._house.desk, self._visit(client)
        reply = waiting[call.id] = asyncio.get_running_loop().create_future()
        desk.take(visit, call)
        try:
            answer = await reply
        except asyncio.CancelledError:
            desk.take(visit, wire.WireCall(wire.ONE_WAY, wire.Nothing(), (), call.id))
            raise
        finally:
            del waiting[call.id]
        if isinstance(call.op, wire.Attach):
            self._visits[visit.client] = visit, waiting
        elif isinstance(call.op, wire.Leave):
            desk.leave(visit)
            self._visits.pop(client, None)
        return answer

    def _visit(self, client: str) -> tuple[Connection, dict[int, asyncio.Future[bytes]]]:
        known = self._visits.get(client)
        if known is None:
            waiting: dict[int, asyncio.Future[bytes]] = {}

            def answer(reply: wire.Reply) -> None:
                waiter = waiting.get(reply.id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(wire.encode(reply))

            known = Connection(answer), waiting
        return known


def start(
    limits: QueueLimits, name: str | None = None, restore_from: str | None = None, **options: object
) -> Handle:
    """Start a queue.

    Args:
        limits: How much rests in it at most.
        name: As which ``ray.get_actor`` finds it.
        restore_from: A directory written by ``snapshot``, on the node where the actor runs.
        options: Further options of the actor, such as ``lifetime`` or a scheduling strategy.
    """
    actor = ray.remote(TransferQueueActor)
    settings = {"num_cpus": 0, "max_concurrency": _CALLS_AT_A_TIME, "name": name, **options}
    return cast("Handle", actor.options(**settings).remote(limits, restore_from))


def stop(queue: Handle) -> None:
    """End a queue, whatever it holds; who uses it raises ``ActorLost``."""
    ray.kill(queue)  # pyright: ignore[reportArgumentType] - a handle is an actor's


def connect(queue: Handle | str, answer_s: float = ANSWER_S) -> SyncTransferQueueClient:
    """A blocking client of a queue: by handle, or by name.

    Raises:
        ActorLost: The queue is not there.
        SnapshotFailed: It could not take up the snapshot it was started with.
    """
    handle, name = _handle_of(queue)
    path = ray_links.got(handle.where.remote(), name, "connect", START_S)
    try:
        return SyncTransferQueueClient.connect(path, name, answer_s)
    except ActorLost:  # it lives: it is on another node
        return SyncTransferQueueClient.over(ray_links.BlockingRayLink(handle, name, answer_s))


async def connect_async(queue: Handle | str, answer_s: float = ANSWER_S) -> TransferQueueClient:
    """A client for this event loop; see ``connect``."""
    handle, name = _handle_of(queue)
    path = await ray_links.awaited(handle.where.remote(), name, "connect", START_S)
    try:
        return await TransferQueueClient.connect(path, name, answer_s)
    except ActorLost:
        link = await ray_links.LoopRayLink.connect(handle, name, answer_s)
        return TransferQueueClient.over(link)


def _handle_of(queue: Handle | str) -> tuple[Handle, str]:
    if isinstance(queue, str):
        try:
            return cast("Handle", ray.get_actor(queue)), queue
        except ValueError as error:
            raise ActorLost(queue, "connect", str(error).splitlines()[0]) from None
    return queue, "queue"

# pyright: basic
# Ray is not fully typed.
"""The queue service as a Ray actor, and the functions that connect Ray programs to it.

Clients on the actor's node use its Unix socket and share memory with it. Clients elsewhere send the
same messages as Ray calls, with the payloads inside.
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
    """Handle of a queue actor."""

    @property
    def where(self) -> RemoteMethod: ...


class TransferQueueActor:
    """A queue in a process of its own. Start it with ``start``; use it through a client."""

    def __init__(self, limits: QueueLimits, restore_from: str | None = None) -> None:
        self._server = QueueServer(limits, restore_from)
        self._connections: dict[str, tuple[Connection, dict[int, asyncio.Future[bytes]]]] = {}

    async def where(self) -> str:
        """Serve, and return the path of the socket on the actor's node.

        Raises:
            SnapshotFailed: The snapshot to restore is invalid.
        """
        return await self._server.open()

    async def exchange(self, body: bytes, client: str = "") -> bytes:
        """Handle one call of a client that cannot reach the socket."""
        await self._server.open()
        call = wire.decode_call(body)
        handler, (connection, waiting) = self._server.handler, self._connection(client)
        reply = waiting[call.id] = asyncio.get_running_loop().create_future()
        handler.take(connection, call)
        try:
            answer = await reply
        except asyncio.CancelledError:
            handler.take(connection, wire.WireCall(wire.ONE_WAY, wire.Nothing(), (), call.id))
            raise
        finally:
            del waiting[call.id]
        if isinstance(call.op, wire.Attach):
            self._connections[connection.client] = connection, waiting
        elif isinstance(call.op, wire.Leave):
            handler.leave(connection)
            self._connections.pop(client, None)
        return answer

    def _connection(self, client: str) -> tuple[Connection, dict[int, asyncio.Future[bytes]]]:
        known = self._connections.get(client)
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
        limits: Capacity of the queue.
        name: Name under which ``ray.get_actor`` finds it.
        restore_from: A directory written by ``snapshot``, on the node where the actor runs.
        options: Further options of the actor, such as ``lifetime`` or a scheduling strategy.
    """
    actor = ray.remote(TransferQueueActor)
    settings = {"num_cpus": 0, "max_concurrency": _CALLS_AT_A_TIME, "name": name, **options}
    return cast("Handle", actor.options(**settings).remote(limits, restore_from))


def stop(queue: Handle) -> None:
    """Stop a queue and discard its content; calls of its clients raise ``ActorLost``."""
    ray.kill(queue)  # pyright: ignore[reportArgumentType] - a handle is an actor's


def connect(queue: Handle | str, answer_s: float = ANSWER_S) -> SyncTransferQueueClient:
    """A blocking client of a queue: by handle, or by name.

    Raises:
        ActorLost: The queue does not exist.
        SnapshotFailed: The queue could not restore the snapshot it was started with.
    """
    handle, name = _handle_of(queue)
    path = ray_links.got(handle.where.remote(), name, "connect", START_S)
    try:
        return SyncTransferQueueClient.connect(path, name, answer_s)
    except ActorLost:  # it is alive, but on another node
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

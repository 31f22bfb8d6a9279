"""The transfer queue as a service for any program: a server, and clients of two kinds.

The names in ``__all__`` are imported when they are first used; ``start``, ``stop``, ``connect`` and
``connect_async`` need Ray, the others do not.

core/                 the queue as a pure object: groups, tasks, leases, waits and bounds
storage/              memory shared by the processes of one node
server/               connections, requests, payload memory, snapshots; ``server.server`` puts it together
clients/              the clients; ``protocol`` is what both do about each request
wire                  typed messages in msgpack, in frames
ray_actor, ray_links  the service as a Ray actor, and the channel of clients on other nodes
"""

from typing import Final

from offbeat.public_names import imported_on_use

_MODULES: Final = {
    "ClientLease": "offbeat.queue_service.clients.lease",
    "LeaseExpired": "offbeat.queue_service.errors",
    "QueueFull": "offbeat.queue_service.errors",
    "QueueLimits": "offbeat.queue_service.core.records",
    "QueuePayloadLost": "offbeat.queue_service.errors",
    "QueueServer": "offbeat.queue_service.server.server",
    "Ragged": "offbeat.transfer_queue.codec",
    "SyncTransferQueueClient": "offbeat.queue_service.clients.blocking_client",
    "TransferQueueClient": "offbeat.queue_service.clients.asyncio_client",
    "connect": "offbeat.queue_service.ray_actor",
    "connect_async": "offbeat.queue_service.ray_actor",
    "start": "offbeat.queue_service.ray_actor",
    "stop": "offbeat.queue_service.ray_actor",
}
"""The module of each public name; ``__init__.pyi`` declares them to type checkers."""

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll] -- the stub lists them

__getattr__, __dir__ = imported_on_use(__name__, _MODULES)

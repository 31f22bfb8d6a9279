from offbeat.queue_service.clients.asyncio_client import TransferQueueClient
from offbeat.queue_service.clients.blocking_client import SyncTransferQueueClient
from offbeat.queue_service.clients.lease import ClientLease
from offbeat.queue_service.core.records import QueueLimits
from offbeat.queue_service.errors import LeaseExpired, QueueFull, QueuePayloadLost
from offbeat.queue_service.ray_actor import connect, connect_async, start, stop
from offbeat.queue_service.server.server import QueueServer
from offbeat.transfer_queue.codec import Ragged

__all__ = [
    "ClientLease",
    "LeaseExpired",
    "QueueFull",
    "QueueLimits",
    "QueuePayloadLost",
    "QueueServer",
    "Ragged",
    "SyncTransferQueueClient",
    "TransferQueueClient",
    "connect",
    "connect_async",
    "start",
    "stop",
]

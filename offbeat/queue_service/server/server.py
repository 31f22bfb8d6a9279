"""Assembles a service: core, payload memory, request handler and socket."""

import asyncio

from offbeat.queue_service.core.core import QueueCore
from offbeat.queue_service.core.records import QueueLimits
from offbeat.queue_service.server.payload_memory import PayloadMemory
from offbeat.queue_service.server.request_handler import RequestHandler
from offbeat.queue_service.server.snapshots import Saving
from offbeat.queue_service.server.socket import Listener, new_path
from offbeat.queue_service.storage.arenas import ArenaAllocator


class QueueServer:
    """A queue service in this process, on the event loop that opens it. It needs no Ray."""

    def __init__(self, limits: QueueLimits, restore_from: str | None = None) -> None:
        self._limits, self._restore_from = limits, restore_from
        self._opening: asyncio.Task[str] | None = None
        self._handler: RequestHandler | None = None
        self._listener: Listener | None = None

    @property
    def handler(self) -> RequestHandler:
        assert self._handler is not None, "open the server first"  # noqa: S101
        return self._handler

    async def open(self) -> str:
        """Start to serve if needed; return the path of the socket.

        Raises:
            SnapshotFailed: The snapshot to start from is invalid.
        """
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> str:
        path = new_path()
        core, memory, saving = (
            QueueCore(self._limits),
            PayloadMemory(ArenaAllocator(), path),
            Saving(),
        )
        newest = 0
        if self._restore_from is not None:
            newest = await saving.restore(self._restore_from, core, memory)
        self._handler = RequestHandler(core, memory, saving, newest)
        self._listener = Listener(path)
        await self._listener.open(self._handler)
        return path

    def close(self) -> None:
        """Stop serving; calls of clients raise ``ActorLost``."""
        if self._listener is not None:
            self._listener.close()
        if self._handler is not None:
            self._handler.close()

"""A queue service in this process, on a thread of its own, and programs that use it from outside."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from offbeat.queue_service.clients.blocking_client import SyncTransferQueueClient
from offbeat.queue_service.core.records import ColumnSpec, QueueLimits
from offbeat.queue_service.server.server import QueueServer
from offbeat.transfer_queue.codec import Columns, Ragged

ROOMY = QueueLimits(max_rows=1 << 20, max_bytes=1 << 30)
COLUMNS = (
    ColumnSpec("ids", "int64"),
    ColumnSpec("logprobs", "float32", ragged=True),
    ColumnSpec("text", "object"),
)
ADVANTAGES = ColumnSpec("advantages", "float32")


@contextmanager
def running(limits: QueueLimits = ROOMY, restore_from: str | None = None) -> Iterator[str]:
    """The path of a service's socket, for blocking clients of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="queue-service")
    thread.start()
    server = QueueServer(limits, restore_from)

    async def close() -> None:
        server.close()

    try:
        yield asyncio.run_coroutine_threadsafe(server.open(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def group(seed: int, tokens: int = 8, rows: int = 4) -> Columns:
    """A group whose values tell which it is; with many ``tokens`` it goes through shared memory."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 2 * tokens, rows)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return {
        "ids": rng.integers(0, 1 << 40, (rows, tokens)),
        "logprobs": Ragged(rng.random(int(offsets[-1]), np.float32), offsets),
        "text": [{"seed": seed, "row": row} for row in range(rows)],
    }


def same(got: Columns, want: Columns) -> bool:
    """Equal in every value."""
    if set(got) != set(want):
        return False
    for name, column in want.items():
        other = got[name]
        if isinstance(column, Ragged):
            assert isinstance(other, Ragged)
            if not np.array_equal(other.values, column.values):
                return False
            if not np.array_equal(other.offsets, column.offsets):
                return False
        elif not np.array_equal(np.asarray(other), np.asarray(column)):
            return False
    return True


def memory_falls_to(client: SyncTransferQueueClient, arena_bytes: int) -> bool:
    """Word of large views that are gone comes by another connection than the calls: await it."""
    while client.stats().arena_bytes != arena_bytes:
        pass
    return True


@contextmanager
def program(path: str, body: str) -> Iterator[subprocess.Popen[str]]:
    """Another process with a client ``c`` of the service, which has run ``body`` and waits."""
    source = (
        "import sys\n"
        "from tests.support.queue_service import group\n"
        "from offbeat.queue_service.clients.blocking_client import SyncTransferQueueClient\n"
        f"c = SyncTransferQueueClient.connect({path!r})\n{body}\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()

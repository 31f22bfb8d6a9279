"""Memory a queue holds: what Ray's object store counts, and what the system counts."""

from collections.abc import Iterable
from pathlib import Path

import psutil
import ray
from ray._private.internal_api import (  # Ray tells it nowhere else without its dashboard
    get_memory_info_reply,
    get_state_from_address,
)

SHARED = ("/memfd:", "/dev/shm")  # noqa: S108 - what such a file is called, not a place to write
BLOCK_BYTES = 512  # of st_blocks, whatever the file system


class ObjectStore:
    """The bytes in use over all nodes of the session: exact, and without delay."""

    def __init__(self) -> None:
        self._state = get_state_from_address(ray.get_runtime_context().gcs_address)

    def bytes_used(self) -> int:
        """Return the bytes in use, without objects that no reference names."""
        return get_memory_info_reply(self._state).store_stats.object_store_bytes_used


def session_pids() -> list[int]:
    """Return the pids of every process below this one: raylet, actors, agents."""
    return [process.pid for process in psutil.Process().children(recursive=True)]


def actor_pid(name: str) -> int:
    """Return the pid of the one actor of the session whose class has this name."""
    (pid,) = (
        process.pid
        for process in psutil.Process().children(recursive=True)
        if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{name}")
    )
    return pid


def resident_bytes(pids: Iterable[int]) -> int:
    """Heaps of the processes, and each piece of shared memory that any of them holds, once.

    Shared memory counts as far as its pages were ever touched and not given back, in use or not.
    """
    private, shared = 0, dict[tuple[int, int], int]()
    for pid in pids:
        try:
            memory = psutil.Process(pid).memory_info()
            private += memory.rss - memory.shared
            shared |= _shared_files(pid)
        except (psutil.NoSuchProcess, FileNotFoundError):  # ended meanwhile
            continue
    return private + sum(shared.values())


def _shared_files(pid: int) -> dict[tuple[int, int], int]:
    """Bytes by identity of the file."""
    found: dict[tuple[int, int], int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if not str(link.readlink()).startswith(SHARED):
                continue
            file = link.stat()
        except FileNotFoundError:  # closed meanwhile
            continue
        found[file.st_dev, file.st_ino] = file.st_blocks * BLOCK_BYTES
    return found

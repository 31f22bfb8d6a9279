"""Controller's side of the spool: groups of a lost owner become payloads of this process."""

# pyright: reportUnknownMemberType=false
# Ray declares functions without the types of their parameters.

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import ray
import structlog
from ray.exceptions import GetTimeoutError, ObjectLostError

from offbeat.actors.ray_ports import PayloadHandle
from offbeat.messages.groups import Receipt, group_id
from offbeat.transfer_queue.spool import NotInSpool, read, sweep
from offbeat.transfer_queue.spool_holds import Hold, Holds, PassedOver

log = structlog.stdlib.get_logger()


class RaySpool:
    """Reads the groups that a former controller left on disk, and removes those no longer needed.

    A group's copy stays on disk as long as its payload handle exists. All methods belong to one
    event loop; files are removed in a thread. On a machine that does not see the producers' disk
    nothing is readable, and groups are rolled out again.
    """

    def __init__(self, directory: Path, needed: Iterable[str] = ()) -> None:
        """Open a spool; segments that are not ``needed`` are removed at once."""
        needed = frozenset(needed)
        self._directory = directory
        self._holds = Holds(needed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        sweep(directory, needed)

    def readable(self, receipt: Receipt) -> PayloadHandle | None:
        """Return the columns of this receipt, now owned by this process; None if they are lost."""
        place = receipt.spooled
        if place is None:
            return None
        try:
            columns = read(self._directory, place)
        except NotInSpool as gone:
            log.warning("spool.unreadable", group=group_id(receipt.prompt_index), error=str(gone))
            return None
        return PayloadHandle(ray.put([columns]), 0, self._holds.inherit(place))

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        """Return the groups with an object that its owner, this process, knows to be lost."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, _lost, payloads)

    def hold(self, receipt: Receipt) -> Hold | None:
        """Return a reference that keeps the copy of a group that has just finished."""
        place = receipt.spooled
        if place is None:
            return None
        hold = self._holds.hold(place)
        if unneeded := self._holds.unneeded():
            self._thread.submit(self._remove, unneeded)
        for left in self._holds.passed_over():
            self._thread.submit(self._remove_unnamed, left)
        return hold

    def close(self, needed: Iterable[str]) -> None:
        """Release everything except the segments that the next controller needs. Blocks."""
        self._thread.shutdown()
        sweep(self._directory, set(needed))

    def _remove_unnamed(self, left: PassedOver) -> None:
        """Remove segments that no receipt has named: all their groups were cancelled."""
        files = [path.name for path in self._directory.glob(f"{left.producer}.*")]
        self._remove([name for name in files if left.includes(name)])

    def _remove(self, segments: list[str]) -> None:
        for segment in segments:
            with contextlib.suppress(OSError):  # the next sweep removes it
                (self._directory / segment).unlink(missing_ok=True)


def _lost(payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
    """Return the groups with a lost object. Each object is checked once, without waiting for it."""
    lost: dict[Any, bool] = {}
    gone = set[int]()
    for prompt_index, handles in payloads.items():
        for ref in (handle.ref for handle in cast("tuple[PayloadHandle, ...]", handles)):
            if ref not in lost:
                lost[ref] = _is_lost(ref)
            if lost[ref]:
                gone.add(prompt_index)
    return gone


def _is_lost(ref: "ray.ObjectRef[Any]") -> bool:
    try:
        ray.get(ref, timeout=0)
    except GetTimeoutError:
        return False  # on another machine, as far as is known
    except ObjectLostError:
        return True
    return False

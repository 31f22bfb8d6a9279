"""Controller's side of the spool over Ray's object store."""

# pyright: reportUnknownMemberType=false
# Ray declares functions without the types of their parameters.

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from offbeat.actors.ray_ports import PayloadHandle
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.spool_holds import Hold
from offbeat.transfer_queue.spool_reader import SpoolReader


class RaySpool(SpoolReader[PayloadHandle]):
    """Spool whose groups become objects of this process."""

    def make_payload(self, columns: Columns, hold: Hold) -> PayloadHandle:
        return PayloadHandle(ray.put([columns]), 0, hold)

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        """Return the groups with an object that its owner, this process, knows to be lost."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, _lost, payloads)


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

"""A world of ranks over ``torch.distributed``: how it comes together, and how its end is told."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from offbeat.actors.trainers.peers import WorldBroken, line_of
from offbeat.actors.trainers.spec import Rendezvous

T = TypeVar("T")
_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
_BROKEN: Final = ("gloo", "NCCL", "Application timeout caused pair closure", "Connection closed")
"""In the text of what a collective raises: gloo has no class of its own for it."""


def listen(host: str, size: int, timeout_s: float) -> TCPStore:
    """Let ranks meet here, at a port that is free."""
    return TCPStore(
        host,
        0,
        world_size=size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def join(at: Rendezvous, rank: int, device: str, listening: TCPStore | None) -> "ProcessGroupPeers":
    """Be a rank of a world; returns once all of its ranks are there.

    Args:
        at: Where.
        rank: Which one.
        device: What the ranks compute on: gloo on the CPU, NCCL on CUDA devices.
        listening: What the first rank got from ``listen``.

    Raises:
        WorldBroken: Not all ranks came in time.
    """
    patience = timedelta(seconds=at.timeout_s)
    try:
        store = listening or TCPStore(at.host, at.port, at.size, timeout=patience)
        return enter(PrefixStore(at.world, store), rank, at.size, device, at.timeout_s)
    except Exception as error:
        if dist.is_initialized():
            dist.destroy_process_group()  # so that these processes can meet again
        if is_broken(error):
            raise WorldBroken(rank, "its start", line_of(error)) from error
        raise


def enter(store: Store, rank: int, size: int, device: str, timeout_s: float) -> "ProcessGroupPeers":
    """The same, where all ranks have a store in common already."""
    kind, patience = device.partition(":")[0], timedelta(seconds=timeout_s)
    dist.init_process_group(
        _BACKENDS[kind], store=store, rank=rank, world_size=size, timeout=patience
    )
    peers = ProcessGroupPeers(kind)
    peers.most([0])
    return peers


class ProcessGroupPeers:
    """All ranks of the process group of this process."""

    def __init__(self, kind: str) -> None:
        self._device = torch.device(kind)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def most(self, values: Sequence[int]) -> list[int]:
        most = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.tolist()

    def gathered(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def told(self, value: T) -> T:
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def are_lost(self, error: Exception) -> bool:
        return is_broken(error)


def is_broken(error: Exception) -> bool:
    """A collective has raised it: a rank is gone, or too late."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _BROKEN)

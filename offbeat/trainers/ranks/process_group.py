"""A world of ranks over ``torch.distributed``: rendezvous, collectives, detection of lost ranks.

Ranks exchange tensors and msgpack, never pickles, so received bytes are data, not code.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from offbeat.trainers.ranks.peers import WorldBroken, shorten_error
from offbeat.trainers.spec import WorldRendezvous
from offbeat.weight_sync.rendezvous.frames import SharedKey, StoreAddress
from offbeat.weight_sync.rendezvous.interface import bind_collectives
from offbeat.weight_sync.rendezvous.store import SharedStore
from offbeat.weight_sync.rendezvous.store_server import StoreServer

T = TypeVar("T")
_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
_BROKEN: Final = ("gloo", "NCCL", "Application timeout caused pair closure", "Connection closed")
"""Substrings of the errors of collectives that lost a rank. gloo has no error class for it."""


def _gather(into: Tensor, own: Tensor) -> None:
    """Gather equal parts of all ranks.

    torch 2.13 renamed the function and warns of the old name.
    """
    is_newer = hasattr(dist, "all_gather_single")
    getattr(dist, "all_gather_single" if is_newer else "all_gather_into_tensor")(into, own)


def open_rendezvous(host: str) -> tuple[StoreServer, StoreAddress]:
    """Start a rendezvous store on a free port of ``host``. It serves only holders of its key."""
    key = SharedKey.random()
    server = StoreServer(host, key)
    return server, StoreAddress(server.host, server.port, key)


def join(at: WorldRendezvous, rank: int, device: str, own_address: str) -> "ProcessGroupPeers":
    """Join a world as ``rank``. Return once all of its ranks have joined.

    Args:
        at: Rendezvous of the world.
        rank: This rank's number.
        device: Device kind of the ranks: gloo is used for the CPU, NCCL for CUDA.
        own_address: This machine's address. gloo and NCCL bind their sockets to its interface.

    Raises:
        WorldBroken: Not all ranks joined before the timeout.
        AddressNotLocal: This machine has a different address.
    """
    bind_collectives(own_address, os.environ)
    try:
        store = SharedStore(at.store, at.timeout_s)
        peers = enter(PrefixStore(at.world, store), rank, at.size, device, at.timeout_s)
    except Exception as error:
        leave()
        if is_broken(error):
            raise WorldBroken(rank, "its start", shorten_error(error)) from error
        raise
    peers.store = store  # groups made later need it; else only its C++ half would stay alive
    return peers


def leave() -> None:
    """Leave the world, if this process has joined one, so that it can join again."""
    if dist.is_initialized():
        dist.destroy_process_group()


def enter(store: Store, rank: int, size: int, device: str, timeout_s: float) -> "ProcessGroupPeers":
    """Join a world over a connected store that its ranks already share."""
    kind, patience = device.partition(":")[0], timedelta(seconds=timeout_s)
    dist.init_process_group(
        _BACKENDS[kind], store=store, rank=rank, world_size=size, timeout=patience
    )
    peers = ProcessGroupPeers(kind, timeout_s)
    peers.all_reduce_max([0])
    return peers


class ProcessGroupPeers:
    """Collectives over the default process group of this process."""

    def __init__(self, kind: str, timeout_s: float) -> None:
        self._device, self.timeout_s = torch.device(kind), timeout_s
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store: Store | None = None

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        most = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.tolist()

    def all_gather(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> list[T]:
        own = self._encode(value)
        lengths = torch.empty(self.size, dtype=torch.int64, device=self._device)
        _gather(lengths, self._length(own))
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(own)] = own
        every = torch.empty(self.size * longest, dtype=torch.uint8, device=self._device)
        _gather(every, padded)
        rows = every.view(self.size, longest).cpu()
        return [
            _decode(row[:length], decoder)
            for row, length in zip(rows, lengths.tolist(), strict=True)
        ]

    def broadcast(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> T:
        own = self._encode(value) if self.rank == 0 else None
        length = self._length(own) if own is not None else self._length(torch.empty(0))
        dist.broadcast(length, src=0)
        if own is None:
            own = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        dist.broadcast(own, src=0)
        return value if self.rank == 0 else _decode(own.cpu(), decoder)

    def are_lost(self, error: Exception) -> bool:
        return is_broken(error)

    def _encode(self, value: object) -> Tensor:
        data = bytearray(msgspec.msgpack.encode(value))
        return torch.frombuffer(data, dtype=torch.uint8).to(self._device)

    def _length(self, data: Tensor) -> Tensor:
        return torch.tensor([data.numel()], dtype=torch.int64, device=self._device)


def _decode(data: Tensor, decoder: "msgspec.msgpack.Decoder[T]") -> T:
    return decoder.decode(data.numpy().tobytes())


def is_broken(error: Exception) -> bool:
    """Return whether a collective raised ``error`` because a rank is gone or too late."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _BROKEN)

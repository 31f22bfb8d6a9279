"""Entry of a trainer rank into a world of ranks; repeats why a process cannot be one of them."""

from collections.abc import Callable
from typing import Any

from offbeat.actors.node_address import reachable_address
from offbeat.trainers.ranks.peers import PeerFailed, Peers, WorldBroken
from offbeat.trainers.spec import WorldRendezvous
from offbeat.weight_sync.rendezvous.frames import StoreAddress


class WorldEntry:
    """Entry of one process into worlds of ranks, one at a time."""

    def __init__(self, rank: int, device: str) -> None:
        """``device``: kind of device of the ranks' collectives."""
        self._rank, self._device = rank, device
        self._unfit: Exception | None = None  # why this process can be no rank of any world
        self._store_server: Any = None  # its module imports torch

    def listen(self) -> StoreAddress:
        """Start the store of a new world; return its address and key."""
        from offbeat.trainers.ranks.process_group import (  # noqa: PLC0415 -- loads torch
            open_rendezvous,
        )

        if self._store_server is not None:
            self._store_server.close()
        self._store_server, address = open_rendezvous(self._own_address)
        return address

    def join(self, at: WorldRendezvous, enter: Callable[[Peers], None]) -> None:
        """Join the other ranks, and make this rank's part of the model with them.

        Raises:
            WorldBroken: Not all joined in time; the same processes may try again.
            Exception: ``enter`` raised it. Later calls raise it again at once: the caller of the
                first may have given up on it before.
        """
        if self._unfit is not None:
            raise self._unfit
        from offbeat.trainers.ranks.process_group import (  # noqa: PLC0415 -- loads torch
            join,
            leave,
        )

        peers = join(at, self._rank, self._device, self._own_address)
        try:
            enter(peers)
        except Exception as error:
            leave()
            if not (peers.are_lost(error) or isinstance(error, (PeerFailed, WorldBroken))):
                self._unfit = error
            raise

    @property
    def _own_address(self) -> str:
        return reachable_address(f"trainer rank {self._rank}")

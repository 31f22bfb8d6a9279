"""Entry of a trainer rank into a world of ranks. Remembers why a process cannot join."""

from collections.abc import Callable
from typing import Any

from offbeat.messages.failures import StartFailed
from offbeat.trainers.ranks.peers import PeerFailed, Peers, WorldBroken
from offbeat.trainers.spec import WorldRendezvous
from offbeat.weight_sync.rendezvous.frames import StoreAddress
from offbeat.weight_sync.rendezvous.interface import AddressNotLocal, find_interface


class WorldEntry:
    """Entry of one process into worlds of ranks, one at a time."""

    def __init__(self, rank: int, device: str, address: Callable[[], str]) -> None:
        """Create the entry of a rank.

        Args:
            rank: Number of the rank.
            device: Kind of device of the ranks' collectives.
            address: Returns the address at which other machines reach this one.
        """
        self._rank, self._device, self._address = rank, device, address
        self._unfit: Exception | None = None  # why this process can join no world
        self._store_server: Any = None  # its module imports torch

    def listen(self) -> StoreAddress:
        """Start the store of a new world. Return its address and key.

        Raises:
            StartFailed: Other machines cannot connect to this one.
        """
        from offbeat.trainers.ranks.process_group import (  # noqa: PLC0415 -- loads torch
            open_rendezvous,
        )

        if self._store_server is not None:
            self._store_server.close()
        self._store_server, address = open_rendezvous(self._reachable_address())
        return address

    def join(self, at: WorldRendezvous, enter: Callable[[Peers], None]) -> None:
        """Join the other ranks, and create this rank's part of the model with them.

        This is a call, not a part of the constructor. Ray restarts an actor with its first
        arguments, which would contain the port of a dead rank 0.

        Raises:
            WorldBroken: Not all joined in time. The same processes may try again.
            StartFailed: Other machines cannot connect to this one.
            Exception: ``enter`` raised it. Later calls raise it again at once, because the first
                caller may have stopped waiting before.
        """
        if self._unfit is not None:
            raise self._unfit
        from offbeat.trainers.ranks.process_group import (  # noqa: PLC0415 -- loads torch
            join,
            leave,
        )

        peers = join(at, self._rank, self._device, self._reachable_address())
        try:
            enter(peers)
        except Exception as error:
            leave()
            if not (peers.are_lost(error) or isinstance(error, (PeerFailed, WorldBroken))):
                self._unfit = error
            raise

    def _reachable_address(self) -> str:
        """Return the address of this machine.

        Raises:
            StartFailed: No local network interface has it, so no other rank could connect to it.
        """
        address = self._address()
        try:
            find_interface(address)
        except AddressNotLocal as error:
            raise StartFailed(f"trainer rank {self._rank}", str(error)) from error
        return address

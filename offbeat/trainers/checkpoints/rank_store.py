"""The checkpoint store that all ranks of a world share.

All ranks write and read together, in a directory that all of them see. Each reads back and digests
a share of the files. Rank 0 leads: it decides which checkpoints are written and loaded, and
broadcasts an order. All ranks execute the order, and all gather the outcomes. This repeats until
rank 0 broadcasts that the work is done. If one rank fails, all fail.

If the trainer's machine has no access to the run directory, checkpoints are local and are copied
(``MirroredCheckpoints``). The run directory is authoritative. Before a rewind, its checkpoints are
fetched to this machine. After a save or a rewind, the run directory is made equal to this machine.
This works for one rank only, because several ranks write one checkpoint together.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec

from offbeat.messages.failures import CheckpointFailed
from offbeat.run_files.disk import DISK, Disk
from offbeat.run_files.files import Files, fingerprints
from offbeat.run_files.transfer import fetch, send
from offbeat.trainers.checkpoints.manifest import (
    CheckpointManifest,
    FileRecord,
    Identity,
    describe,
)
from offbeat.trainers.checkpoints.store import LATEST, CheckpointStore, VerifiedCheckpoint, Write
from offbeat.trainers.ranks.peers import PeerFailed, Peers, run_on_all_ranks

T = TypeVar("T")


class _Order(msgspec.Struct, frozen=True, tag=True):
    """Order to every rank: digest a share of these files, or without names, write its own files."""

    directory: str
    names: Sequence[str] | None = None


class _Done(msgspec.Struct, frozen=True, tag=True):
    """End of the work, with the result of rank 0 as msgpack, or None if rank 0 failed."""

    result: bytes | None


class _Outcome(msgspec.Struct, frozen=True):
    """Outcome of an order on one rank: the files that it digested, or its failure."""

    records: Sequence[FileRecord] = ()
    failure: str | None = None
    by_other: bool = False  # the failure only reports that another rank failed


_BYTES: Final = msgspec.msgpack.Decoder(int)
_FOUND: Final = msgspec.msgpack.Decoder[CheckpointManifest | None](CheckpointManifest | None)
_ORDERS: Final = msgspec.msgpack.Decoder[_Order | _Done](_Order | _Done)
_OUTCOMES: Final = msgspec.msgpack.Decoder(_Outcome)


class RankCheckpoints:
    """One rank's access to the shared store. All ranks must make the same calls together."""

    def __init__(
        self,
        root: Path,
        identity: Identity,
        *,
        keep: int,
        peers: Peers,
        disk: Disk | None = None,
    ) -> None:
        """Open the store on rank 0. The arguments are described at ``CheckpointStore``."""
        self._peers = peers
        self._store = CheckpointStore(
            root, identity, keep=keep, rank=peers.rank, describe=self._order, disk=disk
        )
        self._write: Write | None = None  # this rank's part of an order to write

    def save(self, version: int, weights_digest: str, nbytes: int, write: Write) -> int:
        """Save like ``CheckpointStore.save``. ``write`` is called on all ranks, or on none.

        Raises:
            CheckpointFailed: On rank 0, and on the rank with the failed disk.
            PeerFailed: On the others.
        """
        self._write = write

        def lead() -> int:
            return self._store.save(version, weights_digest, nbytes, self._order)

        return self._convert_errors(version, lambda: self._run("checkpoint", lead, _BYTES))

    def rewind(self, at_most: int) -> VerifiedCheckpoint | None:
        """Rewind like ``CheckpointStore.rewind``. All ranks return the same checkpoint."""

        def lead() -> CheckpointManifest | None:
            stored = self._store.rewind(at_most)
            return None if stored is None else stored.manifest

        found = self._run("restore", lead, _FOUND)
        return None if found is None else self._store.with_directory(found)

    def load(self, stored: VerifiedCheckpoint, load: Write) -> None:
        """Load a checkpoint on all ranks. If one rank fails, all ranks raise.

        Raises:
            CheckpointFailed: This rank could not read the checkpoint.
            PeerFailed: Another rank could not read the checkpoint.
        """

        def read() -> None:
            self._convert_errors(stored.version, lambda: load(stored.directory))

        run_on_all_ranks(self._peers, "restore", read)

    def _convert_errors(self, version: int, work: Callable[[], T]) -> T:
        """Run ``work``. Convert disk errors to ``CheckpointFailed`` with rank and version."""
        try:
            return work()
        except OSError as error:
            raise CheckpointFailed(self._peers.rank, version, str(error)) from error

    def _run(self, during: str, lead: Callable[[], T], decoder: "msgspec.msgpack.Decoder[T]") -> T:
        """Run ``lead`` on rank 0, which sends orders to all. Return its result on all ranks.

        Raises:
            Exception: On rank 0, the error of ``lead``. On any rank, the error of its own work.
            PeerFailed: On the others.
        """
        if self._peers.rank:
            return decoder.decode(self._follow(during))
        try:
            result = lead()
        except Exception as error:
            if not self._peers.are_lost(error):
                self._peers.broadcast(_Done(None), _ORDERS)
            raise
        self._peers.broadcast(_Done(msgspec.msgpack.encode(result)), _ORDERS)
        return result

    def _follow(self, during: str) -> bytes:
        """Execute orders until rank 0 is done. Return its encoded result."""
        failure: Exception | None = None  # of the last order only
        while isinstance(order := self._peers.broadcast(_Done(None), _ORDERS), _Order):
            _, failure = self._carry_out(order)
        if order.result is None:
            raise failure or PeerFailed(self._peers.rank, 0, during)
        return order.result

    def _order(self, directory: Path, names: Sequence[str] | None = None) -> list[FileRecord]:
        """Order each rank to digest a share of these files, or to write its own files.

        Raises:
            OSError: A rank could not execute the order.
            Exception: This rank failed.
        """
        order = _Order(str(directory), names)
        self._peers.broadcast(order, _ORDERS)
        outcomes, failure = self._carry_out(order)
        if failure is not None and not isinstance(failure, PeerFailed):
            raise failure
        failed = [
            (each.by_other, rank, each.failure)
            for rank, each in enumerate(outcomes)
            if each.failure is not None
        ]
        if failed:
            _, rank, text = min(failed)
            raise OSError(f"rank {rank}: {text}")
        records = chain.from_iterable(each.records for each in outcomes)
        return sorted(records, key=lambda each: each.name)

    def _carry_out(self, order: _Order) -> tuple[list[_Outcome], Exception | None]:
        """Execute this rank's share. Return the outcomes of all ranks and this rank's failure."""
        outcome, failure = _Outcome(), None
        try:
            if order.names is None:
                cast("Write", self._write)(Path(order.directory))
            else:
                own = order.names[self._peers.rank :: self._peers.size]
                outcome = _Outcome(describe(Path(order.directory), own))
        except Exception as error:
            if self._peers.are_lost(error):
                raise
            of_disk = isinstance(error, OSError)
            text = str(error) if of_disk else f"{type(error).__name__}: {error}"
            outcome, failure = _Outcome((), text, isinstance(error, PeerFailed)), error
        return self._peers.all_gather(outcome, _OUTCOMES), failure


FOLDER: Final = "checkpoints"
_STATE, _ABANDONED, _PARTIAL = "state_", "abandoned_", ".partial_"


class MirroredCheckpoints:
    """Checkpoint store of one rank, mirrored to the driver's run directory."""

    def __init__(self, store: RankCheckpoints, root: Path, files: Files) -> None:
        """Mirror ``store``. Its checkpoints are in ``root`` on this machine."""
        self._store, self._root, self._files = store, root, files

    def save(self, version: int, weights_digest: str, nbytes: int, write: Write) -> int:
        """Save like ``RankCheckpoints.save``. Return only once the copy is in the run directory."""
        saved = self._store.save(version, weights_digest, nbytes, write)
        try:
            self._publish(gone=(_STATE, _ABANDONED))
        except OSError as error:
            raise CheckpointFailed(0, version, str(error)) from error
        return saved

    def rewind(self, at_most: int) -> VerifiedCheckpoint | None:
        """Rewind like ``RankCheckpoints.rewind``, among the checkpoints of the run directory."""
        try:
            self._fetch()
            found = self._store.rewind(at_most)
            self._publish(gone=(_STATE,))
        except OSError as error:
            raise CheckpointFailed(0, at_most, str(error)) from error
        return found

    def load(self, stored: VerifiedCheckpoint, load: Write) -> None:
        self._store.load(stored, load)

    def _fetch(self) -> None:
        """Fetch every state and LATEST from the run directory."""
        there, here = self._files.listing(FOLDER), fingerprints(self._root)
        self._root.mkdir(parents=True, exist_ok=True)
        for name, content in there.items():
            if _is_kept(name) and here.get(name) != content:
                fetch(self._files, FOLDER, name, content, self._root / name)
        for name in here:
            if _is_kept(name) and name not in there:
                DISK.remove(self._root / name)

    def _publish(self, gone: tuple[str, ...]) -> None:
        """Copy the local states to the run directory.

        Remove the ``gone`` entries of the run directory that do not exist locally.
        """
        there, here = dict(self._files.listing(FOLDER)), fingerprints(self._root)
        extra = {there[name]: name for name in there if name not in here and _is_of_a_state(name)}
        for name in sorted(
            here, key=lambda each: each == LATEST
        ):  # last, because it must name a complete state
            if name.startswith(_PARTIAL) or there.get(name) == here[name]:
                continue
            if (renamed := extra.pop(here[name], None)) is not None:
                self._files.rename(f"{FOLDER}/{renamed}", f"{FOLDER}/{name}")
                del there[renamed]
            elif name == LATEST or _is_of_a_state(name):
                send(self._files, self._root / name, FOLDER, name)
        for name in there:
            if name not in here and name.startswith((*gone, _PARTIAL)):
                self._files.remove(f"{FOLDER}/{name}")
        if LATEST in there and LATEST not in here:
            self._files.remove(f"{FOLDER}/{LATEST}")


def _is_kept(name: str) -> bool:
    return name == LATEST or name.startswith(_STATE)


def _is_of_a_state(name: str) -> bool:
    return name.startswith((_STATE, _ABANDONED, "corrupt_"))

"""The checkpoint store that all ranks of a world share.

Rank 0 decides what is written and what is loaded; all write and read together, in a directory that
all of them see, and each reads back and verifies a share of the files. A failure of one rank is a
failure of all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from offbeat.messages.failures import CheckpointFailed
from offbeat.run_files.disk import Disk
from offbeat.trainers.checkpoints.manifest import CheckpointManifest, Identity
from offbeat.trainers.checkpoints.shared_work import SharedWork, Write
from offbeat.trainers.checkpoints.store import CheckpointStore, VerifiedCheckpoint
from offbeat.trainers.ranks.peers import Peers, run_on_all_ranks

T = TypeVar("T")


class _Found(msgspec.Struct, frozen=True):
    """``VerifiedCheckpoint`` in the form that rank 0 sends."""

    directory: str
    manifest: CheckpointManifest


_BYTES: Final = msgspec.msgpack.Decoder(int)
_FOUND: Final = msgspec.msgpack.Decoder[_Found | None](_Found | None)


class RankCheckpoints:
    """One rank's access to the shared store. All ranks make the same calls together."""

    def __init__(
        self,
        root: Path,
        identity: Identity,
        *,
        keep: int,
        peers: Peers,
        disk: Disk | None = None,
    ) -> None:
        """Open the store on rank 0; the arguments are those of ``CheckpointStore``."""
        self._peers, self._work = peers, SharedWork(peers)
        self._store = CheckpointStore(
            root, identity, keep=keep, rank=peers.rank, readers=self._work, disk=disk
        )

    def save(self, version: int, weights_digest: str, nbytes: int, write: Write) -> int:
        """Save like ``CheckpointStore.save``; ``write`` is called on all ranks, or on none.

        Raises:
            CheckpointFailed: On rank 0, and on the rank whose disk failed.
            PeerFailed: On the others.
        """
        return self._named(
            version,
            lambda: self._work.run(
                "checkpoint",
                lambda: self._store.save(version, weights_digest, nbytes, self._work.write),
                _BYTES,
                write,
            ),
        )

    def rewind(self, at_most: int) -> VerifiedCheckpoint | None:
        """Rewind like ``CheckpointStore.rewind``; all ranks return the same."""

        def lead() -> _Found | None:
            stored = self._store.rewind(at_most)
            return None if stored is None else _Found(str(stored.directory), stored.manifest)

        found = self._work.run("restore", lead, _FOUND)
        return None if found is None else VerifiedCheckpoint(Path(found.directory), found.manifest)

    def load(self, stored: VerifiedCheckpoint, load: Write) -> None:
        """Load a checkpoint on all ranks; if one fails, all raise.

        Raises:
            CheckpointFailed: It could not be read.
            PeerFailed: Another rank could not read it.
        """

        def read() -> None:
            self._named(stored.version, lambda: load(stored.directory))

        run_on_all_ranks(self._peers, "restore", read)

    def _named(self, version: int, work: Callable[[], T]) -> T:
        """Run ``work``; an error of the disk becomes a ``CheckpointFailed`` naming rank and version."""
        try:
            return work()
        except OSError as error:
            raise CheckpointFailed(self._peers.rank, version, str(error)) from error

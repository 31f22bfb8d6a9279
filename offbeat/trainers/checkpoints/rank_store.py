"""The one store of checkpoints that all ranks of a world have.

The first rank decides what is written and what is taken up; all write and read together, in a
directory that all of them see, and each reads back and verifies a share of the files. What fails on
one of them fails on all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from offbeat.messages.failures import CheckpointFailed
from offbeat.trainers.checkpoints.disk import CheckpointDisk
from offbeat.trainers.checkpoints.manifest import CheckpointManifest, Identity
from offbeat.trainers.checkpoints.shared_work import SharedWork, Write
from offbeat.trainers.checkpoints.store import CheckpointStore, VerifiedCheckpoint
from offbeat.trainers.ranks.peers import Peers, together

T = TypeVar("T")


class _Found(msgspec.Struct, frozen=True):
    """``VerifiedCheckpoint``, as the first rank sends it."""

    directory: str
    manifest: CheckpointManifest


_BYTES: Final = msgspec.msgpack.Decoder(int)
_FOUND: Final = msgspec.msgpack.Decoder[_Found | None](_Found | None)


class RankCheckpoints:
    """A rank's hand on the store. All ranks make the same calls together."""

    def __init__(
        self,
        root: Path,
        identity: Identity,
        *,
        keep: int,
        peers: Peers,
        disk: CheckpointDisk | None = None,
    ) -> None:
        """As ``CheckpointStore``, of which the first rank's is the one that does the work."""
        self._peers, self._work = peers, SharedWork(peers)
        self._store = CheckpointStore(
            root, identity, keep=keep, rank=peers.rank, readers=self._work, disk=disk
        )

    def save(self, version: int, weights_digest: str, nbytes: int, write: Write) -> int:
        """As ``CheckpointStore.save``; ``write`` is called on all ranks, or on none.

        Raises:
            CheckpointFailed: On the first rank, and on the one whose disk it was.
            PeerFailed: On the others.
        """
        return self._named(
            version,
            lambda: self._work.together(
                "checkpoint",
                lambda: self._store.save(version, weights_digest, nbytes, self._work.write),
                _BYTES,
                write,
            ),
        )

    def rewind(self, at_most: int) -> VerifiedCheckpoint | None:
        """As ``CheckpointStore.rewind``: the same on all ranks."""

        def lead() -> _Found | None:
            stored = self._store.rewind(at_most)
            return None if stored is None else _Found(str(stored.directory), stored.manifest)

        found = self._work.together("restore", lead, _FOUND)
        return None if found is None else VerifiedCheckpoint(Path(found.directory), found.manifest)

    def load(self, stored: VerifiedCheckpoint, load: Write) -> None:
        """Take up what was found, on all ranks or on none that goes on.

        Raises:
            CheckpointFailed: It could not be read.
            PeerFailed: On another rank it could not.
        """

        def read() -> None:
            self._named(stored.version, lambda: load(stored.directory))

        together(self._peers, "restore", read)

    def _named(self, version: int, work: Callable[[], T]) -> T:
        """A failure of the disk becomes one of this rank at this checkpoint."""
        try:
            return work()
        except OSError as error:
            raise CheckpointFailed(self._peers.rank, version, str(error)) from error

"""The one store of checkpoints that all ranks of a world have.

The first rank decides what is written and what is taken up; all write and read together, in a
directory that all of them see. What fails on one of them fails on all.
"""

from collections.abc import Callable
from pathlib import Path

from offbeat.actors.trainers.checkpoint_store import CheckpointStore, Stored
from offbeat.actors.trainers.peers import PeerFailed, Peers, agreed_most
from offbeat.messages.failures import CheckpointFailed

Write = Callable[[Path], None]


class RankCheckpoints:
    """A rank's hand on the store. All ranks make the same calls together."""

    def __init__(self, store: CheckpointStore, peers: Peers) -> None:
        self._store, self._peers = store, peers

    def save(self, version: int, weights_digest: str, nbytes: int, write: Write) -> int:
        """As ``CheckpointStore.save``; ``write`` is called on all ranks, or on none. Bytes: of the first.

        Raises:
            CheckpointFailed: As there, on the rank where it happened.
            PeerFailed: On the others, if they were to write.
        """
        if self._peers.size == 1:
            return self._store.save(version, weights_digest, nbytes, write)
        if self._peers.rank:
            self._help(version, write)
            return 0
        told = list[Path]()

        def write_together(directory: Path) -> None:
            told.append(directory)
            self._peers.told(directory)
            try:
                self._write(directory, write)
            except PeerFailed as failed:
                raise OSError(str(failed)) from failed

        try:
            return self._store.save(version, weights_digest, nbytes, write_together)
        finally:
            if not told:
                self._peers.told(None)

    def rewind(self, at_most: int) -> Stored | None:
        """As ``CheckpointStore.rewind``: the same on all ranks."""
        found, failure = None, None
        if not self._peers.rank:
            try:
                found = self._store.rewind(at_most)
            except Exception as error:
                if self._peers.size == 1:
                    raise
                failure = error
        agreed_most(self._peers, "restore", 0, failure)
        return self._peers.told(found)

    def load(self, stored: Stored, load: Write) -> None:
        """Take up what was found, on all ranks or on none that goes on.

        Raises:
            CheckpointFailed: It could not be read.
            PeerFailed: On another rank it could not.
        """
        failure = None
        try:
            load(stored.directory)
        except OSError as error:
            failure = CheckpointFailed(self._peers.rank, stored.version, str(error))
        agreed_most(self._peers, "restore", 0, failure)

    def _help(self, version: int, write: Write) -> None:
        directory: Path | None = self._peers.told(None)
        if directory is not None:
            try:
                self._write(directory, write)
            except OSError as error:
                raise CheckpointFailed(self._peers.rank, version, str(error)) from error

    def _write(self, directory: Path, write: Write) -> None:
        failure = None
        try:
            write(directory)
        except OSError as error:
            failure = error
        agreed_most(self._peers, "checkpoint", 0, failure)

"""Checkpoints of a trainer on a machine without access to the run directory: local, with a copy.

The run directory is authoritative. Before a rewind its checkpoints are fetched to this machine;
after a save or a rewind it is made equal to this machine. For one rank only: several ranks write
one checkpoint together.
"""

from pathlib import Path
from typing import Final

from offbeat.messages.failures import CheckpointFailed
from offbeat.run_files.disk import DISK
from offbeat.run_files.files import Files, fingerprints
from offbeat.run_files.transfer import fetch, send
from offbeat.trainers.checkpoints.rank_store import RankCheckpoints
from offbeat.trainers.checkpoints.store import LATEST, VerifiedCheckpoint, Write

FOLDER: Final = "checkpoints"
_STATE, _ABANDONED, _PARTIAL = "state_", "abandoned_", ".partial_"


class MirroredCheckpoints:
    """Checkpoint store of one rank, mirrored to the driver's run directory."""

    def __init__(self, store: RankCheckpoints, root: Path, files: Files) -> None:
        """Mirror ``store``, which keeps its checkpoints in ``root`` on this machine."""
        self._store, self._root, self._files = store, root, files

    def save(self, version: int, weights_digest: str, nbytes: int, write: Write) -> int:
        """Save like ``RankCheckpoints.save`` and return when the copy is in the run directory."""
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
        """Copy the local states to the run directory; remove its entries ``gone`` that are not local."""
        there, here = dict(self._files.listing(FOLDER)), fingerprints(self._root)
        extra = {there[name]: name for name in there if name not in here and _is_of_a_state(name)}
        for name in sorted(
            here, key=lambda each: each == LATEST
        ):  # last: it names a state that is complete by then
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

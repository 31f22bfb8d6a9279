"""Checkpoints of a trainer's whole state, written atomically.

    state_N        a complete checkpoint of version N
    LATEST         name of the newest checkpoint, for people and tools; ``newest`` does not read it
    abandoned_N    from a rewound lineage; removed once the new lineage has a checkpoint
    corrupt_N      found damaged at a rewind; kept for diagnosis
    .partial_*     left by a process that died while writing or removing; the next save removes it

A checkpoint is written as ``.partial_*``, synced file by file, and renamed. Then LATEST is
replaced, and only then older ones are removed. So after the first save, LATEST always names a
complete checkpoint.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from offbeat.messages.failures import CheckpointFailed
from offbeat.run_files.disk import Disk
from offbeat.trainers.checkpoints.manifest import (
    MANIFEST,
    SCHEMA,
    CheckpointCorrupt,
    CheckpointManifest,
    Describe,
    Identity,
    check_identity,
    check_version,
    describe,
    encode,
    read_manifest,
    verify,
)
from offbeat.trainers.errors import CheckpointMismatch

Write = Callable[[Path], object]
"""Function that writes the files of a state into a directory, or reads them."""

log = structlog.stdlib.get_logger()
LATEST: Final = "LATEST"
_STATE, _ABANDONED, _CORRUPT, _PARTIAL = "state_", "abandoned_", "corrupt_", ".partial_"
_MOST_DIGITS: Final = 18
_MARGIN_BYTES: Final = 2**20  # room that a file system needs in addition to the content


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint that has been verified."""

    directory: Path
    manifest: CheckpointManifest

    @property
    def version(self) -> int:
        return self.manifest.version


class CheckpointStore:
    """The checkpoints in one directory. One writer at a time."""

    def __init__(
        self,
        root: Path,
        identity: Identity,
        *,
        keep: int,
        rank: int = 0,
        describe: Describe = describe,
        disk: Disk | None = None,
    ) -> None:
        """Keep the ``keep`` newest complete checkpoints, and one more while one is written."""
        self._root, self._identity, self._keep, self._rank = root, identity, keep, rank
        self._describe, self._disk = describe, disk or Disk()

    def save(self, version: int, weights_digest: str, nbytes: int, write: Write) -> int:
        """Save a state. Return its size in bytes once it is durable and LATEST names it.

        If the same checkpoint already exists intact, nothing is written. A different or damaged
        checkpoint of this version is set aside.

        Args:
            version: Weight version of the state. It names the checkpoint.
            weights_digest: Digest of the weights in the state.
            nbytes: Estimated size of the state.
            write: Writes the files into the given empty directory. It need not sync them.

        Raises:
            CheckpointFailed: The disk is full, cannot be written, or failed. Earlier checkpoints
                are unchanged, and ``newest`` finds them.
        """
        partial, final = self._root / f"{_PARTIAL}{version}_{os.getpid()}", self._directory(version)
        try:
            self._disk.make_directory(self._root)
            self._sweep()
            stored = self._same(version, weights_digest)
            if stored is None:
                self._check_room(version, nbytes)
                manifest = self._write(partial, version, weights_digest, write)
                self._disk.rename(partial, final)
                self._disk.sync(self._root)
                stored = VerifiedCheckpoint(final, manifest)
            self._name_as_latest(stored)
        except OSError as error:
            self._give_up(partial)
            raise CheckpointFailed(self._rank, version, str(error)) from error
        self._prune(version)
        return stored.manifest.nbytes

    def newest(self, at_most: int) -> VerifiedCheckpoint | None:
        """Return the newest checkpoint of this version or older whose files are all intact.

        Damaged checkpoints are skipped and logged. Their files are not changed.

        Raises:
            CheckpointMismatch: The newest undamaged checkpoint belongs to a different model,
                backend or schema.
        """
        versions = (each for each in self._versions() if each <= at_most)
        return next((found for each in versions if (found := self._verify(each))), None)

    def rewind(self, at_most: int) -> VerifiedCheckpoint | None:
        """Return ``newest``. Set aside newer checkpoints, because their versions are retrained.

        If the result is None, which means the initial model, all checkpoints are set aside and
        LATEST is removed.

        Raises:
            CheckpointMismatch: ``newest`` raised it. No checkpoint is set aside.
            CheckpointFailed: The disk failed. The trainer must not continue from there.
        """
        found = self.newest(at_most)
        version = found.version if found else 0
        newer = [each for each in self._versions() if each > version]
        try:
            if newer:
                self._name_as_latest(found)
            for each in newer:
                self._set_aside(each, _CORRUPT if each <= at_most else _ABANDONED)
            if newer:
                self._disk.sync(self._root)
        except OSError as error:
            raise CheckpointFailed(self._rank, version, str(error)) from error
        return found

    def with_directory(self, manifest: CheckpointManifest) -> VerifiedCheckpoint:
        """Return a verified checkpoint of this store, by its manifest."""
        return VerifiedCheckpoint(self._directory(manifest.version), manifest)

    def latest(self) -> int | None:
        """Return the version in LATEST, or None if LATEST is missing or damaged."""
        file = self._root / LATEST
        name = file.read_bytes().removeprefix(_STATE.encode()).strip() if file.exists() else b""
        return int(name) if name.isdigit() and len(name) <= _MOST_DIGITS else None

    # --- writing ---------------------------------------------------------------------------------

    def _write(
        self, partial: Path, version: int, weights_digest: str, write: Write
    ) -> CheckpointManifest:
        """Write and sync all files of a checkpoint under a temporary name."""
        self._disk.make_directory(partial)
        write(partial)
        written = sorted(partial.iterdir())
        for file in written:
            self._disk.sync(file)
        files = tuple(self._describe(partial, [file.name for file in written]))
        manifest = CheckpointManifest(SCHEMA, version, weights_digest, self._identity, files)
        self._disk.write(partial / MANIFEST, encode(manifest))
        self._disk.sync(partial / MANIFEST)
        self._disk.sync(partial)
        return manifest

    def _check_room(self, version: int, nbytes: int) -> None:
        free = self._disk.free_bytes(self._root)
        if free < nbytes + _MARGIN_BYTES:
            problem = (
                f"it needs about {nbytes / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free in "
                f"{self._root}. Free some space"
            )
            raise CheckpointFailed(self._rank, version, problem)

    def _same(self, version: int, weights_digest: str) -> VerifiedCheckpoint | None:
        """Return this checkpoint if it exists intact. Set aside anything else under its name."""
        if version not in self._versions():
            return None
        there = self._verify(version)
        if there and there.manifest.weights_digest == weights_digest:
            return there
        if self.latest() == version:
            self._name_as_latest(self.newest(version - 1))
        self._set_aside(version, _ABANDONED if there else _CORRUPT)
        return None

    def _name_as_latest(self, stored: VerifiedCheckpoint | None) -> None:
        """Replace LATEST durably and atomically, or remove it for None."""
        latest = self._root / LATEST
        if stored is None:
            self._disk.remove(latest)
        elif self.latest() != stored.version:
            beside = self._root / f"{_PARTIAL}{LATEST}"
            self._disk.write(beside, f"{stored.directory.name}\n".encode())
            self._disk.sync(beside)
            self._disk.rename(beside, latest)
        self._disk.sync(self._root)

    def _set_aside(self, version: int, prefix: str) -> None:
        """Rename a checkpoint so that its name begins with ``prefix``, which tells the reason."""
        names = (f"{prefix}{version}{again}" for again in _suffixes())
        free = next(name for name in names if not (self._root / name).exists())
        log.warning("checkpoint.set_aside", version=version, name=free)
        self._disk.rename(self._directory(version), self._root / free)

    # --- removing --------------------------------------------------------------------------------

    def _prune(self, version: int) -> None:
        """Remove checkpoints that are no longer needed. If the disk fails, only space is lost."""
        whole = [each for each in self._versions() if each <= version and self._complete(each)]
        gone = [self._directory(each) for each in whole[self._keep :]]
        gone += sorted(self._root.glob(f"{_ABANDONED}*"))
        hidden = [self._root / f"{_PARTIAL}{path.name}" for path in gone]
        try:
            for path, partial in zip(gone, hidden, strict=True):
                self._disk.rename(
                    path, partial
                )  # so that a partly removed checkpoint never has its name
            if hidden:
                self._disk.sync(self._root)
            for partial in hidden:
                self._disk.remove(partial)
        except OSError as error:
            log.warning("checkpoint.not_removed", version=version, error=str(error))

    def _sweep(self) -> None:
        for path in sorted(self._root.glob(f"{_PARTIAL}*")):
            self._disk.remove(path)

    def _give_up(self, partial: Path) -> None:
        """Remove a partial checkpoint if the disk allows it. Otherwise the next save removes it."""
        try:
            self._disk.remove(partial)
        except OSError as error:
            log.warning("checkpoint.not_removed", path=str(partial), error=str(error))

    # --- reading ---------------------------------------------------------------------------------

    def _directory(self, version: int) -> Path:
        return self._root / f"{_STATE}{version}"

    def _versions(self) -> list[int]:
        """Return the versions of all checkpoints, newest first."""
        names = (path.name.removeprefix(_STATE) for path in self._root.glob(f"{_STATE}*"))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _verify(self, version: int) -> VerifiedCheckpoint | None:
        """Return a checkpoint if every byte is intact. Otherwise log it and return None."""
        directory = self._directory(version)
        try:
            manifest = read_manifest(directory)
            check_version(directory, manifest, version)
            check_identity(directory, manifest, self._identity)
            verify(directory, manifest.files, self._describe)
        except CheckpointCorrupt as corrupt:
            log.warning("checkpoint.corrupt", file=corrupt.file, problem=corrupt.problem)
            return None
        except OSError as error:
            log.warning("checkpoint.unreadable", file=str(directory), problem=str(error))
            return None
        return VerifiedCheckpoint(directory, manifest)

    def _complete(self, version: int) -> CheckpointManifest | None:
        """Return the manifest if all files exist with their sizes, without reading them."""
        try:
            return read_manifest(self._directory(version))
        except (CheckpointCorrupt, CheckpointMismatch, OSError):
            return None


def _suffixes() -> Iterator[str]:
    yield ""
    again = 2
    while True:
        yield f".{again}"
        again += 1

"""Copies a model to a directory of this node: whole files by their digest, a rename at the end of each.

A copy that was interrupted is continued by the next one: files that are whole and equal are kept. A
file is written under a hidden name, synced and renamed, so that none is ever there in part under its
own name.
"""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat.messages.failures import OffbeatError
from offbeat.run_files.disk import Disk
from offbeat.staging.manifest import FOLDERS, ManifestFile, ModelManifest, shortened
from offbeat.staging.outcome import NodeOutcome, StagingVerdict
from offbeat.staging.plan import CopyPlan, foreign_names, plan_copy
from offbeat.staging.progress import ProgressMeter
from offbeat.staging.source import ModelSource, digest_of

PART: Final = ".part"
_LOCK: Final = ".offbeat-stage.lock"
_SYNCED_BYTES: Final = 256 * 2**20
"""Bytes between two syncs of a growing file, so that bytes counted as progress are on the disk."""


class NodeRefused(OffbeatError):
    """A node cannot take the model as it is."""

    verdict: StagingVerdict
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix}"


def copy_model(
    manifest: ModelManifest, source: ModelSource, target: Path, meter: ProgressMeter, disk: Disk
) -> NodeOutcome:
    """Copy what ``target`` lacks of a model; the outcome says what was done, or what prevented it."""
    copy = _Copy(manifest, source, target, meter, disk)
    try:
        disk.make_directory(target)
        with _locked(target):
            copy.run()
    except NodeRefused as refused:
        return copy.outcome(refused.verdict, str(refused))
    except OSError as error:
        problem = f"{meter.now}: {error}. Fix the disk or the path, and stage again"
        return copy.outcome(StagingVerdict.FAILED, problem)
    return copy.outcome(StagingVerdict.COPIED if copy.copied else StagingVerdict.KEPT, "")


@dataclass(slots=True)
class _Copy:
    """One copy to one directory."""

    manifest: ModelManifest
    source: ModelSource
    target: Path
    meter: ProgressMeter
    disk: Disk
    kept: int = 0
    copied: int = 0
    copied_bytes: int = 0

    def run(self) -> None:
        self._check_names()
        for folder in _folders(self.target):
            for part in folder.glob(f".*{PART}"):
                self.disk.remove(part)
        plan = plan_copy(self.manifest, dict(self._digests()))
        self.kept = len(plan.kept)
        self._check_room(plan)
        for file in plan.copied:
            self._copy(file)
            self.copied += 1
            self.copied_bytes += file.nbytes
        self.disk.sync(self.target)

    def outcome(self, verdict: StagingVerdict, problem: str) -> NodeOutcome:
        return NodeOutcome(verdict, self.kept, self.copied, self.copied_bytes, problem)

    def _check_names(self) -> None:
        there = [
            entry.relative_to(self.target).as_posix()
            for folder in _folders(self.target)
            for entry in folder.iterdir()
            if not entry.is_dir()
        ]
        if foreign := foreign_names(self.manifest, there):
            problem = f"{self.target} holds files that are not of this model: {shortened(foreign)}"
            fix = "Name an empty directory, or remove them"
            raise NodeRefused(StagingVerdict.FOREIGN_FILES, problem, fix)

    def _digests(self) -> Iterator[tuple[str, str]]:
        """Yield the digests of the files that are there with the right size.

        A link is not taken for a copy: what it leads to may be on another machine's disk.
        """
        for file in self.manifest.files:
            path = self.target / file.name
            try:
                there = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(there.st_mode) and there.st_size == file.nbytes:
                _, digest = digest_of(path, "checking", file.name, self.meter)
                yield file.name, digest

    def _check_room(self, plan: CopyPlan) -> None:
        free_bytes = self.disk.free_bytes(self.target)
        if missing_bytes := plan.missing_bytes(free_bytes):
            problem = (
                f"{self.target} has {free_bytes:,} bytes free, and {plan.copied_bytes:,} are to be "
                f"copied with 1 GiB left over: {missing_bytes:,} too few"
            )
            raise NodeRefused(StagingVerdict.NO_ROOM, problem, "Make room, or name another disk")

    def _copy(self, file: ManifestFile) -> None:
        path = self.target / file.name
        part = path.with_name(f".{path.name}{PART}")
        self.disk.make_directory(path.parent)
        self.meter.begin("copying", file.name, file.nbytes)
        try:
            self._write(file, part)
            self.disk.rename(part, path)
        except (OSError, NodeRefused):
            self.disk.remove(part)
            raise
        self.disk.sync(path.parent)

    def _write(self, file: ManifestFile, part: Path) -> None:
        nbytes, unsynced, digest = 0, 0, hashlib.sha256()
        handle = self.disk.create(part)
        try:
            for chunk in self.source.chunks(file):
                self.disk.append(handle, chunk)
                digest.update(chunk)
                nbytes, unsynced = nbytes + len(chunk), unsynced + len(chunk)
                if unsynced >= _SYNCED_BYTES:
                    self.disk.sync_appended(handle)
                    unsynced = 0
                self.meter.advance(len(chunk))
            self.disk.sync_appended(handle)
        finally:
            self.disk.close(handle)
        if (nbytes, digest.hexdigest()) != (file.nbytes, file.sha256):
            problem = (
                f"{file.name} was read here as {nbytes:,} bytes of SHA-256 {digest.hexdigest()[:12]}, "
                f"and at the source as {file.nbytes:,} of {file.sha256[:12]}"
            )
            fix = "Stage again when nothing writes to the source; if it repeats, check disk and memory"
            raise NodeRefused(StagingVerdict.SOURCE_CHANGED, problem, fix)


def _folders(target: Path) -> list[Path]:
    return [target, *(path for path in (target / each for each in FOLDERS) if path.is_dir())]


@contextmanager
def _locked(target: Path) -> Generator[None]:
    """Hold the directory against other copies, from this machine or one that shares it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(target / _LOCK, flags, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EACCES}:
                raise
            problem = f"another process is staging into {target}"
            fix = "Name a directory that is local to each node, or wait for the other process"
            raise NodeRefused(StagingVerdict.IN_USE, problem, fix) from error
        yield
    finally:
        os.close(handle)

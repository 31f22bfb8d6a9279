"""Access to the run directory for processes on other machines, by an actor next to the driver.

Names are relative and must be below a few folders. A file is at most as large as announced, and a
call contains at most ``CHUNK_BYTES``. Every call except ``append`` is idempotent.
"""

import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

import msgspec
import structlog
import xxhash

from offbeat.messages.failures import OffbeatError
from offbeat.run_files.disk import DISK
from offbeat.run_files.limits import read_limited
from offbeat.run_files.line_file import append_line
from offbeat.run_files.shared_directory import RunDirToken

log = structlog.stdlib.get_logger()
CHUNK_BYTES: Final = 8 * 2**20
FOLDERS: Final = ("checkpoints", "logs", "rollouts")
FAILURES: Final = "failures.jsonl"
"""File of a run directory with failures. Each line has a row, a response and a traceback."""

FAILURES_BYTES: Final = 8 * 2**20
"""Maximum size of that file. Later failures are not kept."""

ELSEWHERE: Final = "elsewhere.jsonl"
"""File of a run directory that lists the processes that wrote on other machines, and where."""

_MARGIN_BYTES: Final = 64 * 2**20  # free space to leave on the driver's disk, for the journal
# Larger files are compared by size, and by the small files next to them
_DIGESTED_BYTES: Final = 2**20
_NAME_BYTES: Final = 255

Fingerprint = tuple[tuple[str, int, str], ...]
"""Name, size and digest of each file of an entry. Large files have no digest."""


class BadName(OffbeatError):
    """A name outside the folders that other machines may write.

    Fix: report it.
    """

    name: str

    def __str__(self) -> str:
        return f"{self.name!r} is not the name of a file below {', '.join(FOLDERS)} of the run directory"


class TooMuch(OffbeatError):
    """A call or a file is larger than allowed.

    Fix: report it.
    """

    name: str
    nbytes: int
    allowed: int

    def __str__(self) -> str:
        return f"{self.name}: {self.nbytes} bytes were sent, at most {self.allowed} are accepted"


class Files(Protocol):
    """Operations of a remote process in the run directory. Each may raise ``OSError``."""

    def sees(self, token: RunDirToken) -> bool: ...
    def elsewhere(self, process: str, machine: str, directory: str) -> None:
        """Record that a process writes on its own machine."""
        ...

    def listing(self, folder: str) -> Mapping[str, Fingerprint]:
        """Return the entries of a folder, including hidden ones."""
        ...

    def read(self, name: str, offset: int, nbytes: int) -> bytes: ...
    def write(self, name: str, offset: int, data: bytes, nbytes: int) -> None:
        """Write a part of a file of ``nbytes``. The part at offset 0 must be written first."""
        ...

    def append(self, name: str, data: bytes) -> None:
        """Append a line. The file ``FAILURES`` grows only up to ``FAILURES_BYTES``."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename an entry. An existing entry with the new name is removed."""
        ...

    def remove(self, name: str) -> None: ...


class RunFiles:
    """``Files`` of a run directory on this machine."""

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir

    def sees(self, token: RunDirToken) -> bool:
        return PurePosixPath(token.name).name == token.name and token.is_in(self._root)

    def elsewhere(self, process: str, machine: str, directory: str) -> None:
        log.info("process.elsewhere", of=process, machine=machine, directory=directory)
        line = msgspec.json.encode({"process": process, "machine": machine, "directory": directory})
        with (self._root / ELSEWHERE).open("ab") as file:
            file.write(line + b"\n")

    def listing(self, folder: str) -> Mapping[str, Fingerprint]:
        return fingerprints(self._path(folder))

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        self._check_size(name, nbytes, CHUNK_BYTES)
        with _open(self._path(name), os.O_RDONLY) as file:
            return os.pread(file, nbytes, offset)

    def write(self, name: str, offset: int, data: bytes, nbytes: int) -> None:
        path = self._path(name)
        self._check_size(name, len(data), CHUNK_BYTES)
        self._check_size(name, offset + len(data), nbytes)
        flags = os.O_WRONLY
        if offset == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._check_size(name, nbytes, max(0, self._free_bytes() - _MARGIN_BYTES))
            flags |= os.O_CREAT | os.O_TRUNC
        with _open(path, flags) as file:
            left, at = memoryview(data), offset
            while left:
                done = os.pwrite(file, left, at)
                left, at = left[done:], at + done
            if at == nbytes:
                os.fsync(file)

    def append(self, name: str, data: bytes) -> None:
        path = self._root / name if name == FAILURES else self._path(name)
        self._check_size(name, len(data), min(CHUNK_BYTES, self._free_bytes()))
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
            if name != FAILURES or os.fstat(file).st_size + len(data) <= FAILURES_BYTES:
                append_line(file, data)

    def rename(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        if not source.exists() and target.exists():
            return  # a repetition of the same call
        if source.is_dir() and target.exists():
            aside = self._path(f"{PurePosixPath(new).parent}/.partial_old_{target.name}")
            DISK.remove(aside)
            target.rename(aside)
            source.rename(target)
            DISK.remove(aside)
        else:
            source.replace(target)
        DISK.sync(target.parent)

    def remove(self, name: str) -> None:
        DISK.remove(self._path(name))

    def _path(self, name: str) -> Path:
        """Return the local path of a received name.

        Raises:
            BadName: The path is outside the run directory, possibly through a link.
        """
        parts = name.split("/")
        good = parts[0] in FOLDERS and not any(
            part in {"", ".", ".."} or "\0" in part or len(os.fsencode(part)) > _NAME_BYTES
            for part in parts
        )
        if not good:
            raise BadName(name)
        path = self._root.joinpath(*parts)
        # The folder itself may be a link created by the owner of the run.
        folder = self._root / parts[0]
        if path != folder and not path.parent.resolve().is_relative_to(folder.resolve()):
            raise BadName(name)
        return path

    @staticmethod
    def _check_size(name: str, nbytes: int, allowed: int) -> None:
        if not 0 <= nbytes <= allowed:
            raise TooMuch(name, nbytes, allowed)

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._root).free


def count_failures(run_dir: Path, group: str) -> int:
    """Return the number of kept failures of a training group.

    Raises:
        FileTooLarge: The file is larger than any file that a run writes.
        NoRegularFile: The file is a pipe, a socket, a device or a directory.
    """
    try:
        lines = read_limited(run_dir / FAILURES, 2 * FAILURES_BYTES).splitlines()
    except FileNotFoundError:
        return 0
    return sum(
        f'"group": "{group}"'.encode() in line and b'"evaluation": false' in line for line in lines
    )


def fingerprints(folder: Path) -> dict[str, Fingerprint]:
    """Return the fingerprints of the entries of a local folder, to compare copies."""
    if not folder.is_dir():
        return {}
    return {entry.name: _fingerprint(entry) for entry in sorted(folder.iterdir())}


def _fingerprint(entry: Path) -> Fingerprint:
    if entry.is_symlink():
        return ()
    if entry.is_file():
        return (_file("", entry),)
    found = sorted(each for each in entry.rglob("*") if each.is_file() and not each.is_symlink())
    return tuple(_file(each.relative_to(entry).as_posix(), each) for each in found)


def _file(name: str, path: Path) -> tuple[str, int, str]:
    size = path.stat().st_size
    small = size <= _DIGESTED_BYTES
    return name, size, xxhash.xxh3_128_hexdigest(path.read_bytes()) if small else ""


@contextmanager
def _open(path: Path, flags: int) -> Generator[int]:
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        yield handle
    finally:
        os.close(handle)

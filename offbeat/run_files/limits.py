"""Defines sizes above which a file of a run directory is not read.

A run directory may come from anybody, so a file is measured before it is decompressed or parsed.
"""

import stat
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from offbeat.messages.bad_json import decode_json
from offbeat.messages.failures import OffbeatError

T = TypeVar("T")
CONFIG_BYTES: Final = 4 * 2**20
SUMMARY_BYTES: Final = 4 * 2**20
STATUS_BYTES: Final = 2**20
TOKENIZER_BYTES: Final = 64 * 2**20
METRICS_BYTES: Final = 64 * 2**20
"""Size above which only ``SAMPLED_LINES`` spaced lines, and as many evaluations, are read."""
SAMPLED_LINES: Final = 2000
SCANNED_BYTES: Final = 8 * 2**30
"""Maximum bytes scanned for evaluations: some five million steps, one or two seconds per 2 GB."""
LINE_BYTES: Final = 2**20
CONFIG_KEYS: Final = 5000
CONFIG_DEPTH: Final = 50
METRIC_NAMES: Final = 500
ROLLOUT_FILE_BYTES: Final = 256 * 2**20
"""Decompressed size, according to the file's metadata, above which a file is left out."""
ROLLOUT_BYTES: Final = 1024 * 2**20
"""Total decompressed size of all files that are read together."""
JOURNAL_FILE_BYTES: Final = 2**30
"""Size of a segment or a snapshot: 20,000 records of 50 KB. A run begins a new one long before."""


class FileTooLarge(OffbeatError):
    """A file of a run directory is larger than any file that a run writes.

    Fix: restore the file that the run wrote.
    """

    path: str
    nbytes: int
    limit: int

    def __str__(self) -> str:
        return (
            f"{self.path} has {self.nbytes:,} bytes; at most {self.limit:,} are read. "
            "Is it the file that the run wrote?"
        )


class NoRegularFile(OffbeatError):
    """A name in a run directory is not a file but a pipe, a socket or a device.

    Fix: restore the file that the run wrote.
    """

    path: str

    def __str__(self) -> str:
        return f"{self.path} is not a regular file. Is it the file that the run wrote?"


class DamagedFile(OffbeatError):
    """A file of a run directory is not JSON, or has content that no run writes.

    Fix: restore the file that the run wrote.
    """

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path} cannot be read: {self.problem}. Is it the file that the run wrote?"


UNREADABLE: Final = (OSError, FileTooLarge, NoRegularFile, DamagedFile)
"""Errors of ``read_json``."""


def regular_bytes(path: Path) -> int:
    """Return the size of a file before it is opened. Opening a pipe would wait for its writer.

    Raises:
        NoRegularFile: It is a pipe, a socket, a device or a directory.
        OSError: It cannot be examined.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise NoRegularFile(str(path))
    return found.st_size


def read_limited(path: Path, limit: int) -> bytes:
    """Return the content of a file of at most ``limit`` bytes.

    Raises:
        FileTooLarge: It is larger.
        NoRegularFile: It is a pipe, a socket, a device or a directory.
        OSError: It cannot be read.
    """
    nbytes = regular_bytes(path)
    if nbytes <= limit:
        with path.open("rb") as file:
            content = file.read(limit + 1)
        if len(content) <= limit:
            return content
        nbytes = max(nbytes, len(content))  # it has grown meanwhile
    raise FileTooLarge(str(path), nbytes, limit)


def read_json(path: Path, limit: int, kind: type[T]) -> T:
    """Decode a JSON file of at most ``limit`` bytes.

    Raises:
        DamagedFile: It is not JSON, of another type, or nested too deeply.
        FileTooLarge: It is larger.
        NoRegularFile: It is a pipe, a socket, a device or a directory.
        OSError: It cannot be read.
    """
    try:
        return decode_json(read_limited(path, limit), kind)
    except msgspec.DecodeError as error:
        raise DamagedFile(str(path), str(error)) from error

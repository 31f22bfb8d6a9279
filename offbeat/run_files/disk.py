"""Disk operations for data that must survive a crash. Tests can make each of them fail."""

import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_NAME_KEPT: Final = 100  # characters; file systems allow 255 bytes


class Disk:
    """The disk. Data is durable only once it is synced. Every failure is an ``OSError``."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and its missing parents."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path, content: bytes) -> None:
        """Create or replace a file. If its name is a link, the link is replaced, never followed."""
        file.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(file, flags, 0o666), "wb") as stream:
            stream.write(content)

    def sync(self, path: Path) -> None:
        """Return once a file's content, or a directory's entries, would survive a power cut."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically. An existing file is replaced, but not a directory with files."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a directory with its content, if it exists. Not atomic."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, directory: Path) -> int:
        """Return the free space of the file system of ``directory``."""
        return shutil.disk_usage(directory).free

    # --- a file that grows -----------------------------------------------------------------------

    def create(self, path: Path) -> int:
        """Create a file and return its descriptor. Raise ``FileExistsError`` if it exists."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(path, flags, 0o644)

    def append(self, file: int, data: bytes) -> None:
        """Write all of ``data`` at the end of the file."""
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]

    def sync_appended(self, file: int) -> None:
        """Make the file's content survive a power cut, provided that the file's name does."""
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)


DISK: Final = Disk()


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a name next to ``path`` for a file that then replaces it, atomically but not durably.

    If the block raises, the file is removed. Two writers use different files. Nobody can guess the
    name, so no other user can put a link there beforehand.
    """
    beside = unguessable_name(path)
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def unguessable_name(path: Path) -> Path:
    """Return a hidden name next to ``path`` that no file has."""
    return path.with_name(f".{path.name[:_NAME_KEPT]}.{secrets.token_hex(8)}")

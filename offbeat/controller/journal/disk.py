"""Wraps the file system calls of the journal, one by one: a test can fail, or crash, at each."""

import os
from pathlib import Path
from typing import Final, Protocol


class JournalDisk(Protocol):
    """Calls block. They raise ``OSError`` as the system does."""

    def create(self, path: Path) -> int:
        """A descriptor of a new file; ``FileExistsError`` where there is one."""
        ...

    def write(self, file: int, data: bytes) -> None:
        """Write all of ``data`` at the end of the file."""
        ...

    def sync(self, file: int) -> None:
        """Make the file's content survive a power cut, once its name does."""
        ...

    def sync_path(self, path: Path) -> None:
        """Sync a file that another process wrote, or the names in a directory."""
        ...

    def rename(self, old: Path, new: Path) -> None: ...
    def remove(self, path: Path) -> None: ...
    def close(self, file: int) -> None: ...


class SystemJournalDisk:
    """The disk."""

    def create(self, path: Path) -> int:
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def write(self, file: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]

    def sync(self, file: int) -> None:
        os.fsync(file)

    def sync_path(self, path: Path) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        path.unlink()

    def close(self, file: int) -> None:
        os.close(file)


SYSTEM_DISK: Final = SystemJournalDisk()

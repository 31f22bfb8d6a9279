"""Disk operations of checkpoints, behind one class so that a test can make each of them fail."""

import os
import shutil
from pathlib import Path


class CheckpointDisk:
    """The disk. Nothing is durable before ``sync``; every failure is an ``OSError``."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and its missing parents."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path, content: bytes) -> None:
        """Create or replace a file."""
        file.write_bytes(content)

    def sync(self, path: Path) -> None:
        """Return once a file's content, or a directory's entries, would survive a power cut."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically. An existing file is replaced; a directory with files is not."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """Remove a file, a link, or a directory with its content; not atomic."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, directory: Path) -> int:
        """Return the free space of the file system of ``directory``."""
        return shutil.disk_usage(directory).free

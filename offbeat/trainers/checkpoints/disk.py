"""Everything a checkpoint does to a disk, in one place, so that a test can let any of it fail."""

import os
import shutil
from pathlib import Path


class CheckpointDisk:
    """The disk. Nothing is durable before ``sync``; whatever it refuses is an ``OSError``."""

    def make_directory(self, path: Path) -> None:
        """Make it and its parents, where they are missing."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, file: Path, content: bytes) -> None:
        """Put a file there, or replace one."""
        file.write_bytes(content)

    def sync(self, path: Path) -> None:
        """Return once a file's content, or a directory's entries, would survive a power cut."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """In one moment. A file that is there is replaced; a directory with files is not."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """A file, a link, or a directory with all that is in it; not in one moment."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, directory: Path) -> int:
        """What can still be written there."""
        return shutil.disk_usage(directory).free

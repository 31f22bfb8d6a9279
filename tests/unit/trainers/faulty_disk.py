"""Disks that fail at any operation, and a power cut that takes what was not synced."""

import errno
import shutil
from pathlib import Path

from offbeat.run_files.disk import Disk


class FaultyDisk(Disk):
    """A real disk that counts its operations and fails at a chosen one.

    ``for_good``: everything after it fails too, as if the process had died there. A write that fails
    leaves half of its content, a removal half of the files.
    """

    def __init__(self, *, fail_at: int | None = None, for_good: bool = False) -> None:
        self.operations = 0
        self.free = 2**40
        self._fail_at, self._for_good = fail_at, for_good
        self._content = set[Path]()  # files whose content was not synced, where they are now
        self._entries = set[Path]()  # files whose directory was not synced since they were made
        self._renames = list[tuple[Path, Path, bytes | None]]()  # old, new, what a file replaced

    def make_directory(self, path: Path) -> None:
        self._count()
        super().make_directory(path)

    def write(self, file: Path, content: bytes) -> None:
        self._content.add(file)
        self._entries.add(file)
        try:
            self._count()
        except OSError:
            super().write(file, content[: len(content) // 2])
            raise
        super().write(file, content)

    def sync(self, path: Path) -> None:
        self._count()
        super().sync(path)
        self._content.discard(path)
        self._entries = {each for each in self._entries if each.parent != path}
        self._renames = [each for each in self._renames if each[1].parent != path]

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        replaced = new.read_bytes() if new.is_file() else None
        super().rename(old, new)
        self._renames.append((old, new, replaced))
        self._content = {_moved(each, old, new) for each in self._content}
        self._entries = {_moved(each, old, new) for each in self._entries - {old}}

    def remove(self, path: Path) -> None:
        try:
            self._count()
        except OSError:
            if path.is_dir():
                for file in sorted(path.iterdir())[::2]:
                    file.unlink()
            raise
        super().remove(path)

    def free_bytes(self, directory: Path) -> int:
        return self.free

    def cut_the_power(self, *, undo: int | None = None) -> None:
        """Lose what was not synced: half a file's content, files of a directory, renames.

        A disk may keep later renames and lose earlier ones: ``undo`` says how many, from the oldest.
        """
        for file in self._content:
            if file.is_file():
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        for file in self._entries:
            file.unlink(missing_ok=True)
        for old, new, replaced in reversed(self._renames[:undo]):
            if not new.exists():
                continue
            shutil.rmtree(old, ignore_errors=True)
            new.replace(old)
            if replaced is not None:
                new.write_bytes(replaced)

    def _count(self) -> None:
        self.operations += 1
        failing = self._fail_at is not None and (
            self.operations >= self._fail_at if self._for_good else self.operations == self._fail_at
        )
        if failing:
            raise OSError(errno.ENOSPC, "No space left on device")


def _moved(file: Path, old: Path, new: Path) -> Path:
    """Where a file is after a rename."""
    return new / file.relative_to(old) if file.is_relative_to(old) else file

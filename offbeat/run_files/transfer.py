"""Atomic copies of files and directories to and from the run directory of another machine."""

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from offbeat.run_files.disk import DISK
from offbeat.run_files.files import CHUNK_BYTES, Files, Fingerprint

_PARTIAL: Final = ".partial_"


def send(files: Files, local: Path, folder: str, name: str) -> None:
    """Copy a file or a directory into a folder of the run directory. Replace an existing entry.

    Raises:
        OSError: A disk or the transfer failed. An existing entry is unchanged.
    """
    partial = f"{folder}/{_PARTIAL}{name}_{secrets.token_hex(4)}"
    try:
        if local.is_dir():
            for each in sorted(path for path in local.rglob("*") if path.is_file()):
                _send_file(files, each, f"{partial}/{each.relative_to(local).as_posix()}")
        else:
            _send_file(files, local, partial)
        files.rename(partial, f"{folder}/{name}")
    except OSError:
        with contextlib.suppress(OSError):  # the first error is raised; a leftover only uses space
            files.remove(partial)
        raise


def fetch(files: Files, folder: str, name: str, content: Fingerprint, target: Path) -> None:
    """Copy an entry of the run directory to ``target``, and replace what ``target`` contains.

    Raises:
        OSError: A disk or the transfer failed.
    """
    partial = target.with_name(f"{_PARTIAL}{target.name}_{os.getpid()}")
    DISK.remove(partial)
    try:
        for relative, nbytes, _ in content:
            source = f"{folder}/{name}/{relative}" if relative else f"{folder}/{name}"
            _fetch_file(files, source, nbytes, partial / relative if relative else partial)
        DISK.remove(target)
        partial.rename(target)
    finally:
        DISK.remove(partial)


def _send_file(files: Files, local: Path, name: str) -> None:
    with local.open("rb") as file:
        nbytes, offset = os.fstat(file.fileno()).st_size, 0
        while True:
            data = file.read(CHUNK_BYTES)
            if not data and offset:
                break
            files.write(name, offset, data, nbytes)
            offset += len(data)
            if not data:
                break


def _fetch_file(files: Files, name: str, nbytes: int, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        offset = 0
        while offset < nbytes:
            data = files.read(name, offset, min(CHUNK_BYTES, nbytes - offset))
            if not data:
                raise OSError(f"{name} ends after {offset} of {nbytes} bytes")
            file.write(data)
            offset += len(data)

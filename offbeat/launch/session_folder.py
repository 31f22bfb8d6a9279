"""Folder of a private Ray's sessions, which nobody but its owner can enter.

Ray makes its folders, with sockets and logs in them, writable for everybody. In a folder that others
reach, they could replace Ray's socket with one of their own, or a log with a link.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from ray._private import services

_BELOW: Final = "/ray/session_2026-11-24_02-05-24_431724_4194304/sockets/plasma_store"
_LONGEST_SOCKET: Final = 107
"""Bytes of the path of a Unix socket on Linux; Ray refuses to start with a longer one."""


def session_folder(environment: Mapping[str, str]) -> str | None:
    """Return the folder for the sessions of a private Ray; None: Ray's default folder.

    The folder is ``ray`` in ``offbeat-UID`` of the folder for temporary files. Ray's own is used where
    ``RAY_TMPDIR`` is set, where paths would be too long, and where no folder can be made.
    """
    if "RAY_TMPDIR" in environment:
        return None
    folder = Path(environment.get("TMPDIR") or "/tmp", f"offbeat-{os.getuid()}")  # noqa: S108
    try:
        if not _is_private(folder):
            folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    except OSError:
        return None  # what Ray says of its own attempt names the fix
    if len(os.fsencode(folder)) + len(_BELOW) > _LONGEST_SOCKET:
        return None
    return str(folder / "ray")


def _is_private(folder: Path) -> bool:
    """Make a folder if there is none; return whether it is this user's, and of nobody else."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return True


@contextmanager
def in_own_session() -> Generator[None, None, None]:
    """Start Ray's processes outside of this process group, within the block.

    ``timeout``, ``kill -TERM -PGID`` and many schedulers signal the driver's process group. Ray's
    daemons block only SIGINT: a SIGTERM would end them and all actors before the run ends in order.

    On Linux only: there the kernel ends them when the driver dies. Elsewhere a Ray process does
    that, and finds them by the group.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    before = services.ConsolePopen
    services.ConsolePopen = partial(before, start_new_session=True)  # pyright: ignore[reportAttributeAccessIssue] -- Ray has no option
    try:
        yield
    finally:
        services.ConsolePopen = before

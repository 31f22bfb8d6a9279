"""Checks whether an actor's machine shares the run directory with the driver.

Before the driver creates any actor, it creates a file with a random name in the run directory. It
removes the file at the end. If a process finds the file with the expected content, it sees the
driver's directory. A process on another machine must also prove that its writes arrive: the
driver's side reads them back. A network file system cannot have cached a random name.
"""

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from offbeat.messages.failures import OffbeatError

_PREFIX: Final = ".offbeat-"
_BYTES: Final = 1024  # maximum number of bytes read from a token


class RunDirNotShared(OffbeatError):
    """A process that must write into the run directory is on a machine that does not see it.

    Fix: use a directory that every machine sees (docs/quickstart.md).
    """

    process: str
    machine: str
    run_dir: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.process} on {self.machine} does not see the driver's run directory "
            f"{self.run_dir}. {self.fix}"
        )


@dataclass(frozen=True, slots=True)
class RunDirToken:
    """A file in the run directory that is visible only to processes that share the directory."""

    name: str
    content: str

    def is_in(self, directory: Path) -> bool:
        """Return whether ``directory`` contains this token with the expected content."""
        return _content(directory / self.name) == self.content


@contextmanager
def new_token(run_dir: Path) -> Generator[RunDirToken]:
    """Create a token and remove it at the end. First remove tokens left by killed drivers.

    The caller must hold the lock of the directory, so that no other live driver has a token there.

    Raises:
        OSError: The directory cannot be written.
    """
    for left_over in run_dir.glob(f"{_PREFIX}*"):
        left_over.unlink(missing_ok=True)
    token = _written(run_dir, secrets.token_hex(8))
    try:
        yield token
    finally:
        with contextlib.suppress(OSError):  # the directory is gone, or no longer writable
            (run_dir / token.name).unlink(missing_ok=True)


class TokenChecker(Protocol):
    """Interface by which the driver's machine confirms that it sees a token."""

    def sees(self, token: RunDirToken) -> bool:
        """Return whether the token is in the driver's run directory."""
        ...


def is_shared(run_dir: Path, token: RunDirToken, driver: TokenChecker | None) -> bool:
    """Return whether this process writes where the driver reads.

    If ``driver`` is None, this is the driver's machine, where seeing the token is enough.
    """
    if not token.is_in(run_dir):
        return False
    if driver is None:
        return True
    try:
        answer = _written(run_dir, f"{token.name.removeprefix(_PREFIX)}-{secrets.token_hex(4)}")
    except OSError:  # visible, but not writable
        return False
    try:
        return driver.sees(answer)
    finally:
        with contextlib.suppress(OSError):
            (run_dir / answer.name).unlink(missing_ok=True)


def place_of_its_own(process: str) -> Path:
    """Make a directory on this machine for this process only."""
    return Path(tempfile.mkdtemp(prefix=f"offbeat-{process}-"))


def machine() -> str:
    """Return the name of this machine, for people."""
    return socket.gethostname()


def _written(run_dir: Path, word: str) -> RunDirToken:
    token = RunDirToken(f"{_PREFIX}{word}", secrets.token_hex(16))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(run_dir / token.name, flags, 0o644)
    try:
        os.write(file, token.content.encode())
    finally:
        os.close(file)
    return token


def _content(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_BYTES).decode("ascii", "replace")
    except OSError:
        return None

"""Downloads a model to the local disk of this machine, or of every node of a cluster.

``huggingface_hub.snapshot_download`` runs in a child process. If no byte moves for some time, the
child is killed and restarted. Complete files are kept. So a hanging client never blocks a node
forever.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from offbeat.launch.bounded_call import run_bounded
from offbeat.launch.hub_snapshot import CannotStage, HubSnapshot, verify
from offbeat.messages.text import list_names, printable

_LOOK_S: Final = 0.5
_SAY_EVERY_S: Final = 10.0
_KILL_S: Final = 10.0
_VERIFY_S: Final = 120.0
_SLOWEST_BYTES_PER_S: Final = 20 * 2**20  # of a disk from which files are verified
_FRUITLESS: Final = 3
"""Number of downloads in a row that stall without completing a file before the node gives up."""


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """State of the target directory. Two equal states mean that no byte moved."""

    missing: tuple[str, ...]
    done_bytes: int
    wanted_bytes: int
    files: frozenset[tuple[str, int, int]]
    """Path, size and time of change [ns] of every file, incomplete ones included."""

    def __str__(self) -> str:
        missing = f"without {list_names(self.missing, 1)}, " if self.missing else ""
        return f"{missing}{self.done_bytes:,} of {self.wanted_bytes:,} bytes"


class Download(Protocol):
    """A running download."""

    def ended(self, within_s: float) -> bool:
        """Return whether the download has ended, after waiting for it."""
        ...

    def kill(self) -> None:
        """Kill the download and remove its incomplete files."""
        ...

    def raise_problem(self) -> None:
        """Raise ``CannotStage`` if the download has ended with a failure."""
        ...


class ChildDownload:
    """``Download`` in a child process that dies with this process."""

    def __init__(self, snapshot: HubSnapshot, target: Path) -> None:
        self._target = target
        described = msgspec.json.encode(snapshot).decode()
        module = (sys.executable, "-m", "offbeat.launch.hub_snapshot", str(os.getpid()))
        self._child = subprocess.Popen(  # noqa: S603 - this package
            [*module, described, str(target)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "HF_HUB_VERBOSITY": "error",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # they would fill the pipe
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )

    def ended(self, within_s: float) -> bool:
        try:
            self._child.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the process waits for a dead disk
            self._child.communicate(timeout=_KILL_S)
        for part in self._target.glob(".cache/huggingface/**/*.incomplete"):
            part.unlink(missing_ok=True)

    def raise_problem(self) -> None:
        _, errors = self._child.communicate()
        if self._child.returncode == 0:
            return
        lines = errors.decode(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "no message")
        problem = f"the download failed with code {self._child.returncode}: {printable(said)}"
        raise CannotStage(str(self._target), problem, "Stage again: whole files are kept")


def stage_model(snapshot: HubSnapshot, target: Path, stall_s: float) -> Generator[str]:
    """Download a model to ``target``, verify it, and yield progress lines.

    Raises:
        CannotStage: The download fails or stalls, or a file is damaged.
        DeadlineExceeded: The disk or the hub is too slow for the comparison with the checksums.
        HubFilesError: The hub does not answer.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStage(str(target), str(error), "Fix the disk or the path") from error
    with _lock(target):
        start, look = partial(ChildDownload, snapshot, target), partial(progress, snapshot, target)
        yield from supervise(start, look, str(target), stall_s, time.monotonic)
        yield f"comparing {len(snapshot.bytes_by_file)} files with their checksums"
        limit_s = _VERIFY_S + snapshot.nbytes / _SLOWEST_BYTES_PER_S
        run_bounded(partial(verify, snapshot, target), "comparison with the checksums", limit_s)


def supervise(
    start: Callable[[], Download],
    look: Callable[[], DownloadProgress],
    target: str,
    stall_s: float,
    now_s: Callable[[], float],
) -> Generator[str]:
    """Run a download to its end. Kill and restart it if no byte moves for ``stall_s``.

    The download is also killed if the caller stops iterating, or if ``look`` fails.

    Raises:
        CannotStage: The download failed, or stalled several times in a row without a new file.
    """
    fruitless, last = 0, look()
    while fruitless < _FRUITLESS:
        download, before = start(), last
        moved_s = said_s = now_s()
        has_ended = False
        try:
            while now_s() - moved_s < stall_s:
                if has_ended := download.ended(_LOOK_S):
                    download.raise_problem()
                    return
                if (seen := look()) != last:
                    last, moved_s = seen, now_s()
                if now_s() - said_s >= _SAY_EVERY_S:
                    said_s = now_s()
                    yield str(last)
        finally:
            if not has_ended:
                download.kill()
        yield f"no byte moved for {stall_s:g} s: {last}. Killed the download"
        fruitless = 0 if len(last.missing) < len(before.missing) else fruitless + 1
    problem = f"no byte moved for {stall_s:g} s, {_FRUITLESS} times: {last}"
    raise CannotStage(target, problem, "Look at the disk and the network, and stage again")


def progress(snapshot: HubSnapshot, target: Path) -> DownloadProgress:
    """Return the state of the files in the target directory."""
    size_by_file, files = dict[str, int](), set[tuple[str, int, int]]()
    for path in target.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
            name, there = path.relative_to(target).as_posix(), path.stat()
            files.add((name, there.st_size, there.st_mtime_ns))
            if name in snapshot.bytes_by_file or path.suffix == ".incomplete":
                size_by_file[name] = there.st_size
    missing = tuple(name for name in snapshot.bytes_by_file if name not in size_by_file)
    done_bytes = sum(size_by_file.values())
    return DownloadProgress(missing, done_bytes, snapshot.nbytes, frozenset(files))


@contextmanager
def _lock(target: Path) -> Generator[None]:
    """Lock the directory against other downloads, including those from machines that share it."""
    handle = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = "another process is staging into it"
            fix = (
                "Wait until it has ended; on a cluster, name a directory of each node's own disk, or "
                "unset RAY_ADDRESS to fill a shared one"
            )
            raise CannotStage(str(target), problem, fix) from error
        yield
    finally:
        os.close(handle)

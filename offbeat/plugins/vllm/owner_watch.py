"""Watcher process that ends an engine's processes when the actor that started them ends.

vLLM's owner process normally stops the engine core. If the owner is killed, the core and its
workers would keep their memory (on a GPU, all of it) while the actor restarts. A core that has just
started would wait minutes for its first message. So a small process watches the owner. Once the
owner has ended, the watcher kills the processes that the owner started. It also removes their
sockets and their named shared memory, which they would have removed themselves.

This file is also the watcher's program, so it uses only the standard library.
"""

import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

MARK: Final = "OFFBEAT_ENGINE_OWNER"
"""Environment variable that marks the engine's processes and their children (see ``/proc``)."""

_SOCKETS: Final = "VLLM_RPC_BASE_PATH"
"""Names the folder of vLLM's sockets. The path of a socket is limited to about a hundred
characters."""

_TRACKER: Final = b"multiprocessing.resource_tracker"
"""Part of the command line of Python's resource tracker, which removes shared memory at the end."""

_TRACKER_S: Final = 10.0  # time for a dead owner's processes to remove their shared memory

# References that keep the watchers running as long as this process
_WATCHERS: Final = list[subprocess.Popen[bytes]]()


def own_engine_processes() -> None:
    """Make all processes that this process starts from now on end with it. Idempotent."""
    if os.environ.get(MARK, "").startswith(f"{os.getpid()}."):
        return
    mark = f"{os.getpid()}.{secrets.token_hex(8)}"
    sockets = tempfile.mkdtemp(prefix="offbeat-engine-")
    this_process = os.pidfd_open(os.getpid())
    try:
        _WATCHERS.append(
            subprocess.Popen(  # noqa: S603 - this very file
                [sys.executable, "-I", "-S", __file__, str(this_process), mark, sockets],
                env={name: value for name, value in os.environ.items() if name != MARK},
                pass_fds=(this_process,),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
    finally:
        os.close(this_process)
    os.environ[MARK], os.environ[_SOCKETS] = mark, sockets


def end_with(owner: int, mark: str, sockets: str) -> None:
    """Wait until ``owner``, a pid file descriptor, ends, then kill the processes with the mark.

    Processes started meanwhile inherit the mark, so this repeats until none is left. At the end it
    removes the folder ``sockets``.
    """
    _wait_for(owner)
    while marked := _bearing(f"{MARK}={mark}".encode()):
        trackers = [process for process, tracks in marked if tracks]
        others = [process for process, tracks in marked if not tracks]
        _kill(others)
        _kill([each for each in trackers if not _has_ended(each, _TRACKER_S)])
        for process, _ in marked:
            os.close(process)
    shutil.rmtree(sockets, ignore_errors=True)


def _kill(processes: list[int]) -> None:
    """Kill processes and return once they have ended."""
    for process in processes:
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has ended by itself
    for process in processes:
        _wait_for(process)


def _bearing(mark: bytes) -> list[tuple[int, bool]]:
    """Return pid file descriptors of processes with this mark, and whether each is a tracker."""
    found = list[tuple[int, bool]]()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            process = os.pidfd_open(int(entry.name))
        except OSError:
            continue  # it has ended
        if mark in _read(entry / "environ").split(b"\0"):
            found.append((process, _TRACKER in _read(entry / "cmdline")))
        else:
            os.close(process)
    return found


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # of another user, or it has ended
        return b""


def _wait_for(process: int) -> None:
    _has_ended(process, None)


def _has_ended(process: int, within_s: float | None) -> bool:
    ended = select.poll()
    ended.register(process, select.POLLIN)
    return bool(ended.poll(None if within_s is None else within_s * 1000))


if __name__ == "__main__":
    end_with(int(sys.argv[1]), sys.argv[2], sys.argv[3])

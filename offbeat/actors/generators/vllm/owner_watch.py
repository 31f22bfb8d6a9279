"""An engine's processes end with the actor that started them, however that ended.

vLLM's engine core is told to stop by its owner. An owner that is killed tells nobody: the core and
its workers would hold their memory, on a GPU all of it, while the next life of the actor starts,
and a core that has just begun would wait minutes for its first answer. So a small process watches
the owner, and kills what the owner has started once it is gone.

This file is also that process's program: it knows the standard library only.
"""

import os
import secrets
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

MARK: Final = "OFFBEAT_ENGINE_OWNER"
"""Inherited by the engine's processes and by what those start; ``/proc`` shows it of each."""

_WATCHERS: Final = list[subprocess.Popen[bytes]]()  # held: they run as long as this process does


def own_engine_processes() -> None:
    """What this process starts from here on ends with it. A second call changes nothing."""
    if os.environ.get(MARK, "").startswith(f"{os.getpid()}."):
        return
    mark = f"{os.getpid()}.{secrets.token_hex(8)}"
    this_process = os.pidfd_open(os.getpid())
    try:
        _WATCHERS.append(
            subprocess.Popen(  # noqa: S603 - this very file
                [sys.executable, "-I", "-S", __file__, str(this_process), mark],
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
    os.environ[MARK] = mark


def end_with(owner: int, mark: str) -> None:
    """Wait for the end of ``owner``, a handle; then kill whoever bears the mark, and wait for it.

    Whoever is started meanwhile bears it too, so this looks again until there is nobody.
    """
    _wait_for(owner)
    while marked := _bearing(f"{MARK}={mark}".encode()):
        for process in marked:
            try:
                signal.pidfd_send_signal(process, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended by itself
        for process in marked:
            _wait_for(process)
            os.close(process)


def _bearing(mark: bytes) -> list[int]:
    """Handles of processes with this entry in their environment."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            process = os.pidfd_open(int(entry.name))
        except OSError:
            continue  # it has ended
        if mark in _environment(entry):
            found.append(process)
        else:
            os.close(process)
    return found


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # somebody else's, or it has ended
        return []


def _wait_for(process: int) -> None:
    ended = select.poll()
    ended.register(process, select.POLLIN)
    ended.poll()


if __name__ == "__main__":
    end_with(int(sys.argv[1]), sys.argv[2])

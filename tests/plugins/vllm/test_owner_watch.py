"""What an owner has started ends with it."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil

OWNER = """
import subprocess, sys, time
from offbeat.plugins.vllm.owner_watch import own_engine_processes
spare = subprocess.Popen(["sleep", "1000"])
own_engine_processes()
own_engine_processes()
child = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
print(spare.pid, child.pid, child.stdout.readline(), flush=True)
time.sleep(1000)
"""
PATIENCE_S = 60


def test_what_a_killed_process_has_started_ends_and_what_was_there_before_does_not() -> None:
    """Children and their children; a watcher of its own ends too."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        spare, *started = (psutil.Process(int(pid)) for pid in owner.stdout.readline().split())
        family = psutil.Process(owner.pid).children(recursive=True)
        watchers = [each for each in family if each not in (spare, *started)]
        owner.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs([*started, *watchers], PATIENCE_S)
    assert (len(started), len(watchers), alive) == (2, 1, [])
    assert spare.is_running()
    spare.kill()


SHARER = """
import multiprocessing, os, sys, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from offbeat.plugins.vllm.owner_watch import own_engine_processes

def share(told):
    memory = SharedMemory(create=True, size=4096)
    sockets = Path(os.environ["VLLM_RPC_BASE_PATH"])
    (sockets / "a-socket").touch()
    told.send((memory.name, str(sockets)))
    time.sleep(1000)

if __name__ == "__main__":
    own_engine_processes()
    told, tell = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("spawn").Process(target=share, args=(tell,)).start()
    print(*told.recv(), flush=True)
    time.sleep(1000)
"""


def test_what_they_shared_by_name_and_their_sockets_go_with_them(tmp_path: Path) -> None:
    program = tmp_path / "sharer.py"
    program.write_text(SHARER)
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        memory, sockets = owner.stdout.readline().split()
        shared = Path("/dev/shm") / memory  # noqa: S108 - where the system keeps it
        assert shared.exists() and Path(sockets).exists()
        family = psutil.Process(owner.pid).children(recursive=True)
        owner.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, PATIENCE_S)
    assert alive == []
    assert not shared.exists()
    assert not Path(sockets).exists()

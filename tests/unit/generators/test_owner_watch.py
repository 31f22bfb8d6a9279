"""What an owner has started ends with it."""

import signal
import subprocess
import sys

import psutil

OWNER = """
import subprocess, sys, time
from offbeat.actors.generators.vllm.owner_watch import own_engine_processes
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

"""Ranks of a sweep point that do not measure: ``python -m tests.plugins.planning.sweep_ranks KIND DESCRIPTOR PARENT``."""

import os
import signal
import sys
import threading

from offbeat.plugins.planning.sweep_task import RankFailed, RankResult, receive_task, reply_on


def main(kind: str, descriptor: int, parent_pid: int) -> None:
    task = receive_task(parent_pid)
    if kind == "measures":
        memory, time = {"train": 64.0 + task.rank}, {"train": 0.5 - task.rank / 4}
        result = RankResult(100, 0.5 + task.rank, 1000, 64.0 + task.rank, memory, time)
        reply_on(descriptor, result)
    elif kind == "second_is_killed" and task.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "second_is_full" and task.rank == 1:
        reply_on(descriptor, RankFailed(out_of_memory=True, error="OutOfMemoryError: 4 GiB"))
    elif kind == "is_killed_in_the_middle_of_a_word":
        os.write(descriptor, b"\x82")
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "names_its_allocator":
        names = ("MALLOC_MMAP_THRESHOLD_", "HF_DEACTIVATE_ASYNC_LOAD")
        said = " ".join(os.environ.get(name, "unset") for name in names)
        reply_on(descriptor, RankFailed(out_of_memory=False, error=said))
    elif kind == "says_half_a_word_and_hangs":
        os.write(descriptor, b"\x82")
        threading.Event().wait()
    else:
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""Ranks of a sweep point that do not measure."""

import os
import signal
import threading
from multiprocessing.connection import Connection

from offbeat.planning.sweep_task import RankFailed, RankResult, RankTask


def measures(task: RankTask, replies: Connection) -> None:
    replies.send(RankResult(100, 0.5 + task.rank, 1000, 64.0 + task.rank, {"train": 64.0}))


def second_is_killed(task: RankTask, replies: Connection) -> None:
    if task.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hangs(task, replies)


def second_is_full(task: RankTask, replies: Connection) -> None:
    if task.rank == 1:
        replies.send(RankFailed(out_of_memory=True, error="OutOfMemoryError: 4 GiB"))
    else:
        hangs(task, replies)


def hangs(task: RankTask, replies: Connection) -> None:
    del task, replies
    threading.Event().wait()

"""The end of a run's processes in a cluster that does not answer."""

import subprocess
import threading
from typing import Any

import pytest

from offbeat.launch.stopping import stop_ray

HANDLES: list[Any] = ["trainer", "generator-0"]


def test_a_cluster_that_answers_is_left_once_every_actor_is_killed() -> None:
    done = list[str]()
    stop_ray(HANDLES, kill=done.append, shutdown=lambda: done.append("left"))
    assert done == ["trainer", "generator-0", "left"]


@pytest.mark.parametrize("blocks", ["kill", "shutdown"])
def test_a_cluster_that_does_not_answer_is_left_all_the_same(blocks: str) -> None:
    answered = threading.Event()

    def call(name: str) -> Any:
        return lambda *_: answered.wait() if name == blocks else None

    stop_ray(HANDLES, kill=call("kill"), shutdown=call("shutdown"), within_s=0.01)
    assert not answered.is_set()
    answered.set()


def test_other_children_of_the_process_live_on() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        stop_ray(HANDLES, kill=lambda _: None, shutdown=lambda: None)
        other.communicate()
    assert other.returncode == 0, "it ended with its input, not by a signal"

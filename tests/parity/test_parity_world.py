"""The processes that the suites of all backends share: whose answer is whose."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from world import WorkerFailed, World


def said(_: Any, value: int) -> int:
    """A job."""
    return value


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing inside the block, and goes on behind it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_an_answer_that_comes_after_its_deadline_is_not_that_of_the_next_job(
    world: World,
) -> None:
    (first,) = world.run(1, "test_parity_world:said", value=1)
    patience, world.deadline_s = world.deadline_s, 0.0
    try:
        with stopped(world.pids[0]), pytest.raises(WorkerFailed, match="no answer within"):
            world.run(1, "test_parity_world:said", value=2)
    finally:
        world.deadline_s = patience
    (third,) = world.run(1, "test_parity_world:said", value=3)
    assert (first, third) == (1, 3)

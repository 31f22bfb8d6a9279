"""Clocks of threads that count no second twice."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from offbeat.local.parts import CpuClocks


def burn(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clocks of threads here")
def test_the_seconds_of_a_hosted_thread_are_not_the_controllers() -> None:
    process_s = 0.0
    clocks = CpuClocks(lambda: process_s)
    executor = ThreadPoolExecutor(1)
    read = clocks.make_clock(executor.submit(threading.current_thread).result())
    before_s, rest_s = read(), clocks.rest_s()
    executor.submit(burn, 0.05).result()
    spent_s = read() - before_s
    assert spent_s >= 0.05
    assert clocks.rest_s() - rest_s == pytest.approx(-spent_s)
    executor.shutdown()
    assert read() >= spent_s  # of a thread that has ended, too

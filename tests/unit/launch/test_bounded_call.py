"""Calls that are abandoned at their limit, and the end of a process behind them."""

import subprocess
import sys
import threading

import pytest

from offbeat.launch.bounded_call import run_bounded
from offbeat.messages.failures import DeadlineExceeded

SCRIPT = """
import sys, threading
from offbeat.launch.bounded_call import run_bounded, exit_behind_blocked_calls
from offbeat.messages.failures import DeadlineExceeded
try:
    run_bounded({call}, "a reply", {within_s})
except DeadlineExceeded:
    print("given up")
exit_behind_blocked_calls(7)
print("went on")
"""


def ended(call: str, within_s: float) -> tuple[int, bytes]:
    """Exit code and output of a process that makes this call last."""
    script = SCRIPT.format(call=call, within_s=within_s)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    return process.returncode, process.stdout


def test_a_call_returns_or_raises_what_it_did_itself() -> None:
    assert run_bounded(lambda: 3, "a reply", 60) == 3
    with pytest.raises(ZeroDivisionError):
        run_bounded(lambda: 1 // 0, "a reply", 60)


def test_a_call_that_blocks_is_given_up_by_its_name() -> None:
    end = threading.Event()
    with pytest.raises(DeadlineExceeded, match="a reply"):
        run_bounded(end.wait, "a reply", 0.01)
    end.set()


def test_a_process_with_a_blocked_call_exits_at_once_with_its_code_and_its_output() -> None:
    assert ended("threading.Event().wait", 0.01) == (7, b"given up\n")


def test_a_process_without_one_goes_on() -> None:
    assert ended("int", 60) == (0, b"went on\n")

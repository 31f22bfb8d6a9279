"""Ends a process together with its parent process."""

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process with its parent, on Linux (prctl(2)).

    Args:
        parent_pid: The process that started this one. If it is already dead, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit("the process that started this one died while it started")

"""Processes of a test that end or stop in the midst of a transfer."""

import signal
import threading
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any


class Victims:
    """Processes that strike themselves, by the code that they run."""

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context
        self._started: list[BaseProcess] = []

    def start(self, code: Callable[..., None], *arguments: Any) -> None:
        process = self._context.Process(target=code, args=arguments, daemon=True)
        process.start()
        self._started.append(process)

    def kill(self) -> None:
        """Kill those that have only stopped, too."""
        for process in self._started:
            process.kill()
            process.join()


def strike_self(sign: int) -> None:
    """Do nothing more in this very thread; sent to the process, it might go on for a moment."""
    signal.pthread_kill(threading.get_ident(), sign)

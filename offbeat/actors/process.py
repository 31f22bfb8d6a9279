"""What every actor process sets up before it works."""

import atexit
import faulthandler
import os
import signal
from pathlib import Path

from offbeat.telemetry.logs import configure_logging


def prepare(name: str, run_dir: str) -> None:
    """Log into the run directory, and have SIGUSR1 dump the stacks of all threads.

    Ray keeps Ctrl-C away from its workers.
    """
    atexit.register(configure_logging(name, Path(run_dir) / "logs").close)
    dump_stacks_on_signal()


def dump_stacks_on_signal() -> None:
    """SIGUSR1 writes the stacks of all threads to stderr; unhandled, it would end the process."""
    faulthandler.register(signal.SIGUSR1)


def incarnation(name: str) -> str:
    """A name for this process life: no other one has it."""
    return f"{name}-{os.getpid()}-{os.urandom(4).hex()}"

"""Sets up every actor process before it works."""

import atexit
import faulthandler
import os
import signal
from pathlib import Path

from offbeat.config.run import RunConfig
from offbeat.telemetry.logs import configure_logging
from offbeat.telemetry.redaction import Redactor


def prepare(name: str, run_dir: str, config: RunConfig | None = None) -> None:
    """Log into the run directory, and have SIGUSR1 dump the stacks of all threads.

    Ray keeps Ctrl-C away from its workers. ``config``: of one that knows the whole recipe, whose
    secrets then reach no log either.
    """
    redactor = Redactor.from_environment(config=config)
    logs = configure_logging(name, Path(run_dir) / "logs", redactor=redactor)
    atexit.register(logs.close)
    dump_stacks_on_signal()


def dump_stacks_on_signal() -> None:
    """SIGUSR1 writes the stacks of all threads to stderr; unhandled, it would end the process."""
    faulthandler.register(signal.SIGUSR1)


def new_incarnation(name: str) -> str:
    """Return a name for this incarnation that no other one has."""
    return f"{name}-{os.getpid()}-{os.urandom(4).hex()}"

"""Setup of the processes of a run."""

import atexit
import faulthandler
import gc
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from offbeat.config.run import RunConfig
from offbeat.telemetry.logs import configure_logging
from offbeat.telemetry.redaction import Redactor

_STDERR: Final = 2  # the descriptor: a notebook replaces ``sys.stderr`` by an object without one


def prepare(name: str, run_dir: str, config: RunConfig | None = None) -> None:
    """Log into the run directory, and dump the stacks of all threads on SIGUSR1.

    Ray shields its workers from Ctrl-C. Pass ``config`` in a process that has the whole recipe, so
    that its secrets are redacted in the log too.
    """
    redactor = Redactor.from_environment(config=config)
    logs = configure_logging(name, Path(run_dir) / "logs", redactor=redactor)
    atexit.register(logs.close)
    dump_stacks_on_signal()


def dump_stacks_on_signal() -> None:
    """Dump the stacks of all threads to stderr on SIGUSR1, which would else end the process."""
    faulthandler.register(signal.SIGUSR1, file=_STDERR)


@contextmanager
def pause_collections() -> Generator[None]:
    """Collect no garbage in the block, which imports large libraries.

    An import creates a million objects that stay, and no garbage; collections would search through
    them again and again. No later collection searches the objects that exist at the end of the
    block: ``gc.unfreeze`` returns them to the collector.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def new_incarnation(name: str) -> str:
    """Return a unique name for this incarnation."""
    return f"{name}-{os.getpid()}-{os.urandom(4).hex()}"

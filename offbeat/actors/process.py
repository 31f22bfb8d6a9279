"""What every actor process sets up before it works."""

import faulthandler
import os
import signal


def prepare() -> None:
    """Have SIGUSR1 dump the stacks of all threads. Ray keeps Ctrl-C away from its workers."""
    faulthandler.register(signal.SIGUSR1)


def incarnation(name: str) -> str:
    """A name for this process life: no other one has it."""
    return f"{name}-{os.getpid()}-{os.urandom(4).hex()}"

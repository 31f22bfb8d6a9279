"""What every actor process sets up before it works."""

import faulthandler
import os
import signal


def prepare() -> None:
    """Leave Ctrl-C to the driver, and dump stacks on SIGUSR1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)


def incarnation(name: str) -> str:
    """A name for this process life: no other one has it."""
    return f"{name}-{os.getpid()}-{os.urandom(4).hex()}"

"""Starts Ray's processes in a session of their own, which signals to the driver do not reach.

``timeout``, a shell's ``kill -TERM -PGID`` and many schedulers signal the process group of the driver.
Ray's daemons are in it, and block SIGINT alone: a SIGTERM would end them, and all actors with them,
before the run could end in order.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from ray._private import services


@contextmanager
def in_own_session() -> Generator[None, None, None]:
    """Start Ray's processes outside of this process group, within the block.

    On Linux only: there the kernel ends them when the driver dies. Elsewhere a Ray process does
    that, and finds them by the group.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    before = services.ConsolePopen
    services.ConsolePopen = partial(before, start_new_session=True)  # pyright: ignore[reportAttributeAccessIssue] -- Ray has no option
    try:
        yield
    finally:
        services.ConsolePopen = before

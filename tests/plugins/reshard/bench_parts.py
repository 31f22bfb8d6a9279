"""Limits and helpers that tests of transfers share."""

import threading
from collections.abc import Callable

from offbeat.plugins.reshard.messages import TransferTimeouts

PATIENT = TransferTimeouts(slowest_bytes_per_s=1e6, slack_s=60.0)  # on a busy machine too
HASTY = TransferTimeouts(slowest_bytes_per_s=1e6, slack_s=1.0)  # where somebody hangs on purpose
HOST = "127.0.0.1"


def together(*calls: Callable[[], None]) -> None:
    """All at once, to their ends."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def names(count: int) -> tuple[str, ...]:
    return tuple(f"g{index}" for index in range(count))

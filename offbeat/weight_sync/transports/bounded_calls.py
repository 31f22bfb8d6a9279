"""Calls into a library that knows no deadline, each in a thread that can be left behind.

    caller                     daemon thread
    waits, to the deadline <-- the call
    asks it to give up     --> returns or raises; or stays until the process ends

A daemon thread does not keep its process from ending, whatever it waits for.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from offbeat.weight_sync.transports.group import BrokenLink

GRACE_S: Final = 1.0
"""Seconds that a call and the request to give up have to end: what has ended disturbs nothing."""
T = TypeVar("T")


def call_within(
    limit_s: float, call: Callable[[], T], *, what: str, give_up: Callable[[], object]
) -> T:
    """Return what a call returns, and leave it behind if it takes too long.

    Args:
        limit_s: Seconds that it may take.
        call: Runs in a daemon thread.
        what: Name of the call, for the error.
        give_up: Asks the call to end. It may take any time itself, and what it raises is ignored.

    Raises:
        BrokenLink: The call has not ended in time, and was asked to. Where that took less than
            ``GRACE_S``, both have ended by now.
        Exception: Whatever the call raises.
    """
    outcome = _begun(call, what)
    wait([outcome], limit_s)
    if not outcome.done():
        pending: list[Future[Any]] = [outcome, _begun(give_up, f"give up: {what}")]
        wait(pending, GRACE_S)
        raise BrokenLink(f"{what} has not ended after {limit_s:.3g} s")
    return outcome.result()


def _begun(call: Callable[[], T], name: str) -> Future[T]:
    outcome = Future[T]()

    def run() -> None:
        try:
            value = call()
        except Exception as error:  # noqa: BLE001 -- raised where the result is taken
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome

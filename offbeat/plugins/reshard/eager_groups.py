"""Process groups that connect when they are created, within a deadline.

NCCL connects two ranks during their first message, in a call without a deadline. If the peer has
died by then, the rank waits until NCCL gives up, or for ever. So both ranks exchange a byte when
they create the group, in a thread that is abandoned at the deadline. A bucket is never the first
message.

    both have started    keys in the store
    both have connected  the byte
"""

# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# A build of torch without NCCL has no types for NCCL.

import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import structlog
from torch import Tensor

from offbeat.plugins.reshard.group import PAIR, BrokenLink, GroupAddress, GroupMaker
from offbeat.weight_sync.background import start_in_thread

GRACE_S: Final = 1.0
"""Seconds for a late call and its ``give_up`` to end, so that they do not disturb later work."""
T = TypeVar("T")


def call_within(
    limit_s: float, call: Callable[[], T], *, what: str, give_up: Callable[[], object]
) -> T:
    """Return the result of a call, or abandon the call at the limit.

    Its daemon thread does not keep the process alive.

    Args:
        limit_s: Maximum seconds of the call.
        call: Function to run in a daemon thread.
        what: Name of the call, for the error.
        give_up: Asks the call to end. ``give_up`` may itself block; its errors are ignored.

    Raises:
        BrokenLink: The call has not ended in time and was asked to end. If the call and ``give_up``
            needed less than ``GRACE_S``, both have ended by now.
        Exception: The call raised it.
    """
    outcome = start_in_thread(call, what)
    wait([outcome], limit_s)
    if not outcome.done():
        pending: list[Future[Any]] = [outcome, start_in_thread(give_up, f"give up: {what}")]
        wait(pending, GRACE_S)
        raise BrokenLink(f"{what} has not ended after {limit_s:.3g} s")
    return outcome.result()


log = structlog.stdlib.get_logger()


class EagerGroups:
    """Wraps another maker of pair groups. Connects, closes and aborts groups within a deadline."""

    def __init__(self, groups: GroupMaker, limit_s: float) -> None:
        """Create the maker.

        Args:
            groups: Creates groups that connect during their first message.
            limit_s: Maximum seconds to connect, close or abort a group.
        """
        self._groups, self._limit_s = groups, limit_s

    def group(self, place: GroupAddress) -> Any:  # noqa: ANN401 -- a backend of torch
        """Return a group of connected ranks.

        Raises:
            BrokenLink: The other rank has not connected in time.
            RuntimeError: The store or the library has reported the failure itself.
        """
        place.store.set(f"ready/{place.rank}", "1")
        place.store.wait([f"ready/{1 - place.rank}"], timedelta(seconds=self._limit_s))
        group = self._groups.group(place)
        try:
            call_within(
                self._limit_s,
                lambda: self._exchange(group, place),
                what=f"forming a group with rank {1 - place.rank}",
                give_up=lambda: self._give_up(group, place),
            )
        except RuntimeError:
            self.abort(group)
            raise
        return group

    def close(self, group: Any) -> None:  # noqa: ANN401 -- as above
        self._end("closing a group", lambda: self._groups.close(group), group)

    def abort(self, group: Any) -> None:  # noqa: ANN401 -- as above
        self._end("aborting a group", lambda: self._groups.abort(group), group)

    def byte(self) -> Tensor:
        return self._groups.byte()

    def _exchange(self, group: Any, place: GroupAddress) -> None:  # noqa: ANN401 -- as above
        call = group.send if place.rank == 0 else group.recv
        call([self._groups.byte()], 1 - place.rank, 0).wait(timedelta(seconds=self._limit_s))

    def _give_up(self, group: Any, place: GroupAddress) -> None:  # noqa: ANN401 -- as above
        place.client.close()  # a thread may wait for an address there
        self._groups.abort(group)

    def _end(self, what: str, end: Callable[[], None], group: Any) -> None:  # noqa: ANN401
        """End a group that is no longer needed. Log a failure."""
        try:
            call_within(self._limit_s, end, what=what, give_up=lambda: self._groups.abort(group))
        except (BrokenLink, RuntimeError) as error:
            log.warning("weights.group_not_ended", error=str(error))


_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_one_at_a_time = threading.Lock()  # the environment belongs to the process


class NcclGroups:
    """Creates NCCL groups of two processes. They connect during their first message.

    Not run yet: ``make test-gpu`` runs it on GPUs. CPU tests use gloo groups instead, which have the
    same calls and also connect during their first message.

    Communicators block, and ``EagerGroups`` enforces the deadlines. Non-blocking communicators
    cannot enforce them: torch reads one timeout for the whole process once, and while it waits it
    holds the lock that an abort needs. NCCL 2.26 also hangs in that mode
    (https://github.com/pytorch/pytorch/issues/153960).
    """

    def __init__(self, memory: Callable[[int], Tensor], abort_s: float) -> None:
        """Create the maker.

        Args:
            memory: Returns memory of the given size on the device.
            abort_s: Maximum seconds that torch waits for a group to be aborted.
        """
        self._memory, self._timeout = memory, timedelta(seconds=abort_s)

    def group(self, place: GroupAddress) -> Any:  # noqa: ANN401 -- there is no such class in CPU builds
        from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 -- as above

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout  # noqa: SLF001 -- there is no public name
        with _errors_are_raised():
            return ProcessGroupNCCL(place.store, place.rank, PAIR, options)

    def close(self, group: Any) -> None:  # noqa: ANN401 -- as above
        group.shutdown()

    def abort(self, group: Any) -> None:  # noqa: ANN401 -- as above
        group.abort()

    def byte(self) -> Tensor:
        return self._memory(1)


@contextmanager
def _errors_are_raised() -> Generator[None]:
    """Make groups raise errors in the call that waits for their results.

    By default a thread of torch ends the process on an NCCL error, so the death of an engine would
    also end the trainer. torch has no argument for this, only a variable, which it reads when a
    group is created.
    """
    with _one_at_a_time:
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ERROR_HANDLING]
            else:
                os.environ[_ERROR_HANDLING] = before

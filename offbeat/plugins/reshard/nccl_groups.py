"""NCCL groups of two processes.

Not run yet: ``make test-gpu`` runs it on GPUs. CPU tests use gloo groups instead, which have the
same calls and also connect during their first message.

Communicators block, and ``EagerGroups`` sets the deadlines. Non-blocking communicators cannot set
them: torch waits with one timeout for the whole process, read once, while holding the lock that an
abort needs. NCCL 2.26 also hangs in that mode (https://github.com/pytorch/pytorch/issues/153960).
"""

# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# A build of torch without NCCL has no types for NCCL.

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from torch import Tensor

from offbeat.plugins.reshard.group import PAIR, GroupAddress

_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_one_at_a_time = threading.Lock()  # the environment belongs to the process


class NcclGroups:
    """Creates NCCL groups of two processes. They connect during their first message."""

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
    also end the trainer. torch reads the variable when a group is created, and has no argument.
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

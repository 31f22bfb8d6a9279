"""NCCL groups of two processes.

Not run yet: ``make test-gpu`` runs it on GPUs. In the tests of a CPU, groups of gloo stand in for it,
which have the same calls and connect in their first message as well.

Communicators are blocking ones, and ``EagerGroups`` has the deadlines. Non-blocking ones would not
have them: torch waits for those with a timeout of the whole process, read once, holding the lock that
an abort needs; and NCCL 2.26 hangs in that mode (https://github.com/pytorch/pytorch/issues/153960).
"""

# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# A build of torch without NCCL has no types for it either.

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
    """Creates NCCL groups of two processes, which connect in their first message."""

    def __init__(self, memory: Callable[[int], Tensor], abort_s: float) -> None:
        """Create the maker.

        Args:
            memory: Returns so many bytes on the device.
            abort_s: Seconds for which torch waits until a group is aborted.
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
    """Have groups raise errors where their results are waited for.

    By default a thread of torch ends the process on an error of NCCL: the death of an engine would
    be that of the trainer. torch reads the variable when a group is created, and has no argument.
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

"""Estimates whether a rank's passes fit into memory, before ranks wait for each other in them.

A rank that runs out of memory inside a pass cannot tell the others. They would wait for it in a
CUDA collective until they are replaced. So before a pass, a rank compares the free memory with the
memory that earlier passes needed. If too little is free, it cuts its rows into smaller
microbatches.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

import structlog
import torch

from offbeat.trainers.batches.packing import PackedRows

T = TypeVar("T")
_log = structlog.stdlib.get_logger()
_NO_ROOM: Final = (
    "a microbatch of {tokens} tokens has no room, and its rows cannot be cut further. Lower "
    "trainer.max_tokens_per_microbatch or generator.max_model_len, or raise trainer.data_parallel"
)


def largest_tokens(microbatches: Sequence[PackedRows]) -> int:
    """Return the tokens of the largest microbatch, padding included, or 0 without any."""
    return max((each.input_ids_RT.size for each in microbatches), default=0)


class Counters(Protocol):
    """Memory counters of a device, like the ones of ``torch.cuda``."""

    def reset_peak_memory_stats(self, device: torch.device, /) -> None: ...
    def memory_allocated(self, device: torch.device, /) -> int: ...
    def max_memory_allocated(self, device: torch.device, /) -> int: ...
    def memory_reserved(self, device: torch.device, /) -> int: ...
    def mem_get_info(self, device: torch.device, /) -> tuple[int, int]: ...


class PassRoom:
    """Compares the free memory of a device with the memory that earlier passes needed.

    A pass needs memory that it frees again (activations). The first pass of a step also allocates
    the gradients, in its first backward. Because the comparison is an estimate, it only leads to
    smaller microbatches. Rows that cannot be cut are refused only after a pass of their size ran
    out of memory, and only once.
    """

    def __init__(self, device: torch.device, counters: Counters = torch.cuda) -> None:
        self._device, self._counters = device, counters
        self._largest, self._freed = 0, 0  # tokens of the largest pass, bytes that it freed again
        self._gradients = 0  # bytes that the first pass of a step allocates for its later passes
        self._is_first = True  # whether the next pass is the first of its step
        self._failed: int | None = None  # tokens of the smallest pass that ran out of memory

    def begin_step(self) -> None:
        """Begin a step, in which the gradients count as not yet allocated."""
        self._is_first = True

    def fit(
        self, read: Callable[[], tuple[T, list[PackedRows]]], cut_smaller: Callable[[int], None]
    ) -> tuple[T, list[PackedRows]]:
        """Return the result of ``read``. While its microbatches do not fit, halve them.

        Args:
            read: Returns any value, and the microbatches.
            cut_smaller: Limits the microbatches of ``read`` to the given number of tokens.

        Raises:
            torch.OutOfMemoryError: The microbatches cannot be cut further, and a pass of their size
                ran out of memory. The next call tries them anyway.
        """
        what, microbatches = read()
        while (has_failed := self._has_failed(microbatches)) or not self._has_room(microbatches):
            tokens = largest_tokens(microbatches)
            cut_smaller(max(1, tokens // 2))
            what, microbatches = read()
            if largest_tokens(microbatches) < tokens:
                _log.warning("microbatch.halved", tokens=tokens)
            elif has_failed:
                self._failed = None
                raise torch.OutOfMemoryError(_NO_ROOM.format(tokens=tokens))
            else:
                break
        return what, microbatches

    @contextmanager
    def measure_pass(self, tokens: int) -> Generator[None]:
        """Measure the passes in the block. The largest one has ``tokens`` tokens."""
        before = self._start()
        try:
            yield
        except torch.OutOfMemoryError:
            self._failed = min(tokens, self._failed or tokens)
            raise
        if self._device.type != "cuda":
            return
        after = self._counters.memory_allocated(self._device)
        if self._is_first:
            self._is_first, self._gradients = False, after - before
        if tokens >= self._largest:
            freed = self._counters.max_memory_allocated(self._device) - after
            # A first pass of one microbatch shows less, because gradients replace activations
            self._largest, self._freed = tokens, max(freed, self._freed)

    def _has_failed(self, microbatches: Sequence[PackedRows]) -> bool:
        return self._failed is not None and largest_tokens(microbatches) >= self._failed

    def _has_room(self, microbatches: Sequence[PackedRows]) -> bool:
        """Return whether the microbatches should fit, judging from earlier passes."""
        if not self._largest:
            return True
        first, others = (
            self._freed * min(1.0, largest_tokens(each) / self._largest)
            for each in (microbatches[:1], microbatches[1:])
        )
        gradients = self._gradients if self._is_first else 0
        return max(first, gradients + others) <= self._free()

    def _start(self) -> int:
        if self._device.type != "cuda":
            return 0
        self._counters.reset_peak_memory_stats(self._device)
        return self._counters.memory_allocated(self._device)

    def _free(self) -> int:
        """Return the bytes that torch can still give to tensors, including its cache."""
        counters, device = self._counters, self._device
        cached = counters.memory_reserved(device) - counters.memory_allocated(device)
        return counters.mem_get_info(device)[0] + cached

"""Memory that the passes of a rank need, known before ranks wait for each other in them.

A rank that runs out of memory inside a pass cannot tell the others, which wait for it in a collective of
CUDA until they are replaced. So a rank compares the memory that is free with what its largest pass took,
and cuts its rows into smaller microbatches if it is less.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

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
    """Return the tokens of the largest microbatch, padding included; 0 without any."""
    return max((each.input_ids_RT.size for each in microbatches), default=0)


class PassRoom:
    """Compares the free memory of a device with what earlier passes took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._largest, self._nbytes = 0, 0  # tokens of the largest pass, and what it took
        self._failed: int | None = None  # tokens of the smallest pass that ran out of memory

    def fit(
        self, read: Callable[[], tuple[T, list[PackedRows]]], cut_smaller: Callable[[int], None]
    ) -> tuple[T, list[PackedRows]]:
        """Return what ``read`` returned, with microbatches that have room; halve them while they have none.

        Args:
            read: Returns anything, and the microbatches.
            cut_smaller: Lets ``read`` cut microbatches of at most so many tokens.

        Raises:
            torch.OutOfMemoryError: They cannot be cut further.
        """
        what, microbatches = read()
        while not self.has_room(tokens := largest_tokens(microbatches)):
            _log.warning("microbatch.halved", tokens=tokens)
            cut_smaller(max(1, tokens // 2))
            what, microbatches = read()
            if largest_tokens(microbatches) >= tokens:
                raise torch.OutOfMemoryError(_NO_ROOM.format(tokens=tokens))
        return what, microbatches

    def has_room(self, tokens: int) -> bool:
        """Return whether a pass over so many tokens fits, as far as earlier passes show."""
        if self._failed is not None and tokens >= self._failed:
            return False
        if not self._largest:
            return True
        return self._nbytes * min(1.0, tokens / self._largest) <= self._free()

    @contextmanager
    def used(self, tokens: int) -> Generator[None]:
        """Measure the passes of the block, the largest of which has so many tokens."""
        before = self._start()
        try:
            yield
        except torch.OutOfMemoryError:
            self._failed = min(tokens, self._failed or tokens)
            raise
        if self._device.type == "cuda" and tokens >= self._largest:
            nbytes = torch.cuda.max_memory_allocated(self._device) - before
            self._largest, self._nbytes = tokens, nbytes

    def _start(self) -> int:
        if self._device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def _free(self) -> int:
        """Return the bytes that torch can still give to tensors, those of its cache included."""
        device = self._device
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached

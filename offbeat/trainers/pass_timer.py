"""Time that a device spends in forward and backward passes."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

import time

import torch


class PassTimer:
    """Clock of passes on a device, which runs from when it is made until ``stop``.

    On CUDA a call returns before its work is done, so that the device itself marks begin and end, and
    nothing waits for them before the seconds are read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin, self._end = self._mark(), None

    def stop(self) -> None:
        """Mark the end of what was computed since the timer was made."""
        self._end = self._mark()

    def seconds(self) -> float:
        """Return the seconds between both marks, once the device has passed the second."""
        begin, end = self._begin, self._end
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        assert isinstance(begin, float) and isinstance(end, float)  # noqa: S101, PT018 -- stopped
        return end - begin

    def _mark(self) -> "torch.cuda.Event | float":
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

"""FLOPs of passes over packed rows, their time, and the peak of a device.

The count follows model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B). Per weight of a
matrix and token: 2 forward, 2 for the gradient of its input, and 2 for the gradient of a trained
weight. Per pair of tokens and dimension of a head: 4 forward and 8 backward. Unlike in PaLM, only
the pairs under a causal mask count, and only the experts that a token is sent to. Recomputation,
padding and operations between the products do not count.
"""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from offbeat.trainers.batches.packing import PADDING, PROMPT, PackedRows

PER_WEIGHT: Final = 6
"""FLOPs per token for a trained weight of a matrix: forward, and both gradients."""

PER_FROZEN_WEIGHT: Final = 4
PER_DIMENSION: Final = 6
"""FLOPs per token pair and head dimension, for scores (queries and keys) or for values."""

PEAKS: Final = (
    ("H200", torch.bfloat16, 989e12),
    ("H200", torch.float32, 67e12),
    ("H100 PCIe", torch.bfloat16, 756e12),
    ("H100 PCIe", torch.float32, 51e12),
    ("H100", torch.bfloat16, 989e12),
    ("H100", torch.float32, 67e12),
    ("A100", torch.bfloat16, 312e12),
    ("A100", torch.float32, 19.5e12),
    ("L40S", torch.bfloat16, 362e12),
    ("L40S", torch.float32, 91.6e12),
    ("L4", torch.bfloat16, 121e12),
    ("L4", torch.float32, 30.3e12),
    ("RTX 4090", torch.bfloat16, 165e12),
    ("RTX 4090", torch.float32, 82.6e12),
)
"""Dense FLOP/s by part of the device's name, and by dtype, from the makers' data sheets.

float32 means without TF32. The first entry that matches counts.
"""


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the maker's FLOP/s of a device in a dtype, or None if the table lacks it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, held, peak in PEAKS if part in name and held == dtype), None)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of one forward and backward pass of a model, by unit of work."""

    token: float
    place: float  # per place with computed logits
    pair: float  # per pair of tokens, one of which attends to the other

    def of(self, packed: PackedRows) -> float:
        """Return the FLOPs of a microbatch."""
        tokens, pairs = tokens_and_pairs(packed)
        return self.token * tokens + self.place * len(packed.predicts_U) + self.pair * pairs


def count_work(microbatches: Sequence[PackedRows], flops: ModelFlops | None) -> tuple[int, float]:
    """Return the tokens of microbatches without padding, and their FLOPs (0 if not known)."""
    tokens = sum(tokens_and_pairs(each)[0] for each in microbatches)
    return tokens, 0.0 if flops is None else sum(map(flops.of, microbatches))


def tokens_and_pairs(packed: PackedRows) -> tuple[int, int]:
    """Return the number of tokens without padding, and of token pairs that attend."""
    if packed.trees:
        pairs = 0
        for tree in packed.trees:
            prompt = tree.prompt.stop - tree.prompt.start
            own = [branch.stop - branch.start for branch in tree.branches]
            pairs += _causal(prompt) + sum(_causal(each) + prompt * each for each in own)
        return packed.segments_RT.size, pairs
    rows, kinds = len(packed.segments_RT), int(packed.segments_RT.max(initial=PROMPT)) + 1
    real_RT = packed.segments_RT != PADDING
    row_RT = np.arange(rows)[:, None] * kinds + packed.segments_RT
    count_RK = np.bincount(row_RT[real_RT], minlength=rows * kinds).reshape(rows, kinds)
    prompt_R, own_RB = count_RK[:, PROMPT], count_RK[:, PROMPT + 1 :]
    pairs = (count_RK * (count_RK + 1) // 2).sum() + (prompt_R * own_RB.sum(axis=1)).sum()
    return int(real_RT.sum()), int(pairs)


def _causal(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


class PassTimer:
    """Clock of passes on a device. It runs from its creation until ``stop``.

    On CUDA a call returns before its work is done. So the device itself marks begin and end, and
    the host only waits for them when the seconds are read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin, self._end = self._mark(), None

    def stop(self) -> None:
        """Mark the end of the computation since the timer was created."""
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

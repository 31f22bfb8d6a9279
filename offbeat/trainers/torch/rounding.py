"""Rounds float32 masters to bfloat16 weights at random, so that they are right on average.

A step at a rate of 1e-5 changes most weights by less than the distance between two bfloat16 numbers.
Rounded to the nearest, such a weight stays where it is for several steps, and its samples and gradients
are those of old weights. Rounded up with the probability of the part that is cut off, the expected
weight is the master (Gupta et al. 2015, "Deep learning with limited numerical precision",
https://arxiv.org/abs/1502.02551, section 2).

The noise depends on the parameter's name and its number of updates alone: a resumed run has the
weights that it had, bit for bit.
"""

from typing import Final
from zlib import crc32

import torch
from torch import Tensor

_BLOCK: Final = 1 << 20
"""Elements that are rounded at once: bounds the memory of the noise."""

_HALF_STEP: Final = 1 << 15
"""Half the distance of two bfloat16 numbers, in float32 numbers."""


def round_stochastically(weights: Tensor, masters: Tensor, name: str, updates: int) -> None:
    """Set ``weights`` to ``masters``, each rounded up or down to one of its two bfloat16 neighbours.

    A master that bfloat16 has is kept as it is.

    Args:
        weights: [...] bfloat16; changed in place.
        masters: [...] float32, finite, of the same shape and device.
        name: Of the parameter: two parameters get different noise.
        updates: How often the optimizer has changed it.
    """
    generator = torch.Generator(masters.device).manual_seed(crc32(f"{name} {updates}".encode()))
    rows = masters.shape[0] if masters.ndim else 1
    per_block = max(1, _BLOCK * rows // max(1, masters.numel()))
    pairs = zip(_blocks(weights, per_block), _blocks(masters, per_block), strict=True)
    for rounded, exact in pairs:
        bits = exact.contiguous().view(torch.int32)
        noise = _noise(bits.shape, generator).to(torch.int32)  # torch adds two widths slowly
        kept = noise.add_(bits).add_(_HALF_STEP).bitwise_and_(-2 * _HALF_STEP)
        rounded.copy_(kept.view(torch.float32))


def _blocks(tensor: Tensor, rows: int) -> tuple[Tensor, ...]:
    return torch.split(tensor, rows) if tensor.ndim else (tensor,)


def _noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return int16 of this shape, equally distributed over all of its values: four of each drawn number."""
    numbers = torch.empty(-(-shape.numel() // 4), dtype=torch.int64, device=generator.device)
    numbers.random_(torch.iinfo(torch.int64).min, None, generator=generator)
    return numbers.view(torch.int16)[: shape.numel()].view(shape)

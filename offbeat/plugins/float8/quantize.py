"""Quantization of weights to float8 in blocks of 128 x 128, each with its own scale.

``values = round(weight / scale)`` with ``scale = largest / 448``. ``largest`` is the largest
magnitude of the block, and 448 is that of float8_e4m3fn. So a value differs from ``weight / scale``
by at most half a unit in its last place. A block depends only on its own weights: a region that
ends at block borders has the same bytes as in the whole tensor.

Legend: N rows, K columns; R, C the same in blocks.

Also quantizes regions of matrices: a rank's part of the values, and of their scales.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from offbeat.plugins.float8.precision import (
    BLOCK,
    UnalignedBlocks,
    is_quantized,
    scale_region,
    scale_shape,
)
from offbeat.weight_sync.dtypes import SCALE_SUFFIX
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region, Shape
from offbeat.weight_sync.wire_format_plugin import UnconvertibleWeights

LARGEST: Final = 448.0  # of float8_e4m3fn
_SMALLEST_SCALE: Final = 2.0**-126  # of normal float32: kernels may flush smaller ones to zero
_ROWS_AT_ONCE: Final = 32 * BLOCK  # bounds the float32 copies of a large matrix


class UnquantizableWeights(UnconvertibleWeights):
    """A matrix with infinities or NaNs, which float8 blocks cannot represent.

    Fix: resume from the last checkpoint.
    """

    tensor: str
    block: str  # as in [128:256, 0:128]

    def __str__(self) -> str:
        return (
            f"{self.tensor}: {self.block} holds an infinity or a NaN, which sync.quantize=fp8_block cannot "
            "represent. The weights have diverged; resume from the last checkpoint with a lower learning rate"
        )


class Quantized(NamedTuple):
    """A matrix in blocks."""

    values: Tensor  # [N, K] float8_e4m3fn
    scales: Tensor  # [R, C] float32


def quantize(name: str, weight: Tensor) -> Quantized:
    """Return a matrix in float8 blocks, on the device of the matrix.

    Args:
        name: Its name, for errors.
        weight: [N, K] float32, bfloat16 or float16; strided or not.

    Returns:
        Values, and the factor that multiplies each block of values: 1 for a block of zeros.

    Raises:
        UnquantizableWeights: A block holds an infinity or a NaN.
    """
    weight = weight.detach()
    shape = tuple(weight.shape)
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(scale_shape(shape), dtype=torch.float32, device=weight.device)
    for start in range(0, shape[0], _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, shape[0]))
        blocks = slice(start // BLOCK, -(-rows.stop // BLOCK))
        values[rows], scales[blocks] = _slab(name, weight[rows], start)
    return Quantized(values, scales)


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the matrix [N, K] that the blocks represent, computed and returned in ``dtype``."""
    rows, columns = quantized.values.shape
    scales = quantized.scales.to(dtype)
    factors = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return quantized.values.to(dtype) * factors


def round_matrix(name: str, weight: Tensor) -> Tensor:
    """Return a matrix with its values after quantization, in its own dtype.

    Raises:
        UnquantizableWeights: A block holds an infinity or a NaN.
    """
    return dequantize(quantize(name, weight), torch.float32).to(weight.dtype)


def quantize_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in the order and form of ``list_quantized_metas``, before packing rounds them.

    Raises:
        UnquantizableWeights: A matrix to quantize holds an infinity or a NaN.
    """
    for name, tensor in named:
        if tensor.dtype == torch.float8_e4m3fn or not is_quantized(name, tuple(tensor.shape)):
            yield name, tensor
            continue
        values, scales = quantize(name, tensor)
        yield name, values
        yield name + SCALE_SUFFIX, scales


def _slab(name: str, weight: Tensor, first_row: int) -> Quantized:
    """Quantize some rows. The first of them begins a block."""
    rows, columns = weight.shape
    padded = functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
    largest_RC = blocks.abs().amax(dim=(1, 3))  # a NaN counts as the largest
    if not bool(torch.isfinite(largest_RC).all()):
        row, column = (int(each) for each in (~torch.isfinite(largest_RC)).nonzero()[0])
        start = first_row + row * BLOCK, column * BLOCK
        raise UnquantizableWeights(name, str(Region.at(start, (BLOCK, BLOCK))))
    scales_RC = (largest_RC / LARGEST).clamp(min=_SMALLEST_SCALE)
    scales_RC = torch.where(largest_RC > 0, scales_RC, torch.ones_like(scales_RC))
    scaled = blocks / scales_RC[:, None, :, None]
    # The quotient of the largest may be rounded to just above the largest value of the type
    values = scaled.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Quantized(values.view(padded.shape)[:rows, :columns], scales_RC)


def quantize_regions(
    held: Iterable[TensorRegion], shapes: Mapping[str, Shape]
) -> Iterator[TensorRegion]:
    """Yield the regions of one rank, like ``quantize_tensors`` for whole tensors.

    Args:
        held: Regions, under the names of the release.
        shapes: Shapes of the whole tensors, by the same names.

    Raises:
        UnalignedBlocks: A region of a matrix to quantize cuts a block.
        UnquantizableWeights: It holds an infinity or a NaN.
    """
    for each in held:
        if not is_quantized(each.name, shapes[each.name]):
            yield each
            continue
        if each.values.dtype == torch.float8_e4m3fn or not each.region.elements:
            yield each
            continue
        scaled = scale_region(each.region, shapes[each.name])
        if scaled is None:
            raise UnalignedBlocks((f"{each.name}{each.region}",))
        values, scales = quantize(each.name, each.values)
        yield TensorRegion(each.name, each.region, values)
        yield TensorRegion(each.name + SCALE_SUFFIX, scaled, scales)


def list_quantized_held(
    held: Iterable[tuple[str, Region]], shapes: Mapping[str, Shape]
) -> list[tuple[str, Region]]:
    """Return names and regions of ``quantize_regions`` without computing a value.

    Raises:
        UnalignedBlocks: For all regions together that cut a block.
    """
    found, unaligned = list[tuple[str, Region]](), list[str]()
    for name, region in held:
        found.append((name, region))
        if not is_quantized(name, shapes[name]) or not region.elements:
            continue
        scaled = scale_region(region, shapes[name])
        if scaled is None:
            unaligned.append(f"{name}{region}")
        else:
            found.append((name + SCALE_SUFFIX, scaled))
    if unaligned:
        raise UnalignedBlocks(tuple(unaligned))
    return found

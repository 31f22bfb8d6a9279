"""Regions of quantized matrices: what a rank holds of the values, and of their scales."""

from collections.abc import Iterable, Iterator, Mapping

import torch

from offbeat.plugins.float8.precision import (
    UnalignedBlocks,
    is_quantized,
    scale_region,
)
from offbeat.plugins.float8.quantize import quantize
from offbeat.weight_sync.dtypes import SCALE_SUFFIX
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region, Shape


def quantized_regions(
    held: Iterable[TensorRegion], shapes: Mapping[str, Shape]
) -> Iterator[TensorRegion]:
    """Yield the regions of one rank as ``quantized_tensors`` yields whole tensors.

    Args:
        held: Regions, under the names of the release.
        shapes: Shapes of the whole tensors, by those names.

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


def quantized_held(
    held: Iterable[tuple[str, Region]], shapes: Mapping[str, Shape]
) -> list[tuple[str, Region]]:
    """Return names and regions of ``quantized_regions`` without computing a value.

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

"""Formats of weights between trainer and engines that a recipe requests. Pure.

    trainer            engine      on the wire
    bf16, fp16, fp32   the same    rounded once, by the sender (``WirePolicy.dtype``)
    bf16, fp16, fp32   a format    converted once, by the sender (``WirePolicy.quantize``)
    a format           the same    the bytes

Every other pair is refused by name before anything starts.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

from offbeat.config.sections.sync_base import BaseSyncConfig
from offbeat.doors import find_plugin, find_plugins
from offbeat.weight_sync.buckets import NamedRegion
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.manifest import TensorMeta
from offbeat.weight_sync.region import Shape
from offbeat.weight_sync.wire_format_plugin import WireFormat

if TYPE_CHECKING:
    from torch import Tensor

    from offbeat.weight_sync.receiver import TensorRegion


def make_policy(sync: BaseSyncConfig) -> WirePolicy:
    """Return the wire formats that a recipe requests."""
    return WirePolicy(sync.wire_dtype, sync.keep_float32, sync.quantize)


def find_wire_format(name: str) -> WireFormat:
    """Return the plug-in of a format.

    Raises:
        PluginUnusable: No package provides it, or its import fails.
    """
    return cast("WireFormat", find_plugin("wire_format", name))


def formats_by_dtype() -> dict[str, WireFormat]:
    """Return the formats that this package provides, by the dtype of converted matrices."""
    formats = cast("dict[str, WireFormat]", find_plugins("wire_format"))
    return {each.dtype: each for each in formats.values()}


def wire_metas(metas: Iterable[tuple[str, Shape, str]], policy: WirePolicy) -> Iterator[TensorMeta]:
    """Yield every tensor of a release in its wire form.

    Raises:
        OffbeatError: ``policy.quantize`` cannot convert some tensors. The error names all of them.
    """
    if policy.quantize is not None:
        return find_wire_format(policy.quantize).metas(metas, policy)
    return (TensorMeta(name, shape, policy(name, dtype), dtype) for name, shape, dtype in metas)


def wire_tensors(
    named: "Iterator[tuple[str, Tensor]]", policy: WirePolicy
) -> "Iterator[tuple[str, Tensor]]":
    """Yield tensors in the order and form of ``wire_metas``. Packing rounds them later.

    Raises:
        UnconvertibleWeights: ``policy.quantize`` cannot represent a matrix.
    """
    return named if policy.quantize is None else find_wire_format(policy.quantize).tensors(named)


def wire_regions(
    held: "Iterable[TensorRegion]", shapes: Mapping[str, Shape], policy: WirePolicy
) -> "Iterator[TensorRegion]":
    """Yield the regions of one rank in the way that ``wire_tensors`` yields whole tensors.

    Args:
        held: Regions, under the names of the release.
        shapes: Shapes of the whole tensors, by the same names.
        policy: Wire formats.

    Raises:
        OffbeatError: A region cuts a block that ``policy.quantize`` converts as a whole.
        UnconvertibleWeights: The format cannot represent a matrix.
    """
    if policy.quantize is None:
        return iter(held)
    return find_wire_format(policy.quantize).regions(held, shapes)


def wire_held(
    held: Iterable[NamedRegion], shapes: Mapping[str, Shape], policy: WirePolicy
) -> list[NamedRegion]:
    """Return the names and regions that ``wire_regions`` yields, without computing values.

    Raises:
        OffbeatError: Regions cut blocks that are converted as a whole. The error names all of them.
    """
    if policy.quantize is None:
        return list(held)
    return find_wire_format(policy.quantize).held(held, shapes)

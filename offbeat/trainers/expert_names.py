"""Conversion of expert weights between separate tensors (files) and fused ones (transformers).

    apart       ....mlp.experts.3.gate_proj.weight [I, H], .up_proj.weight [I, H], .down_proj.weight [H, I]
    together    ....mlp.experts.gate_up_proj [E, 2I, H], ....mlp.experts.down_proj [E, H, I]

Fused experts without a gate have ``up_proj`` [E, I, H] instead of ``gate_up_proj``. A trainer uses
one of the two forms, and so does an engine. The functions keep the order of the tensors. Tensors
that are not experts, or already have the wanted form, are passed through unchanged. Only the
experts of one layer are in memory at a time.

Legend: E experts, I intermediate size of one expert, H hidden size.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from offbeat.messages.failures import OffbeatError
from offbeat.weight_sync.chunks import dtype_name
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region, Shape

Meta = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of a tensor."""

Named = tuple[str, Tensor]

_APART: Final = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_TOGETHER: Final = re.compile(r"(.+\.experts)\.(gate_up|up|down)_proj")
_TOGETHER_AXES: Final = 3


class UnjoinedExperts(OffbeatError):
    """The experts of a layer do not all have the same matrices, so they cannot be fused.

    Fix: repair the model files.
    """

    experts: str
    matrix: str

    def __str__(self) -> str:
        return f"the experts {self.experts} cannot be joined: one has no {self.matrix}, others have"


def fuse_experts(named: Iterable[Named]) -> Iterator[Named]:
    """Yield tensors with the experts of each layer fused into two: [E, 2I, H] and [E, H, I]."""
    for experts, group in groupby(named, key=lambda each: _find_experts(each[0])):
        if not experts:
            yield from group
            continue
        matrices = {_place(name): tensor for name, tensor in group}
        count, is_gated = _form(experts, matrices)
        numbers = range(count)
        if is_gated:
            halves = [torch.cat([matrices["gate", each], matrices["up", each]]) for each in numbers]
            yield f"{experts}.gate_up_proj", torch.stack(halves)
        else:
            yield f"{experts}.up_proj", torch.stack([matrices["up", each] for each in numbers])
        yield f"{experts}.down_proj", torch.stack([matrices["down", each] for each in numbers])


def split_experts(named: Iterable[Named]) -> Iterator[Named]:
    """Yield tensors with the matrices of each expert as separate tensors ([I, H], [H, I])."""
    for name, tensor in named:
        found = _TOGETHER.fullmatch(name)
        if found is None or tensor.ndim != _TOGETHER_AXES:
            yield name, tensor
            continue
        kinds = _KINDS[found[2]]
        for number, expert in enumerate(tensor):
            for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                yield f"{found[1]}.{number}.{kind}_proj.weight", part


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """A naming of experts: how it converts the tensors and their regions."""

    named: Callable[[Iterable[Named]], Iterator[Named]]
    regions: Callable[[Iterable[TensorRegion], Mapping[str, Shape]], Iterator[TensorRegion]]
    """(regions by the trainer's names, whole shapes by those names) -> regions by these names."""

    def metas(self, metas: Iterable[Meta]) -> Iterator[Meta]:
        """Yield name, shape and dtype of each tensor that ``named`` yields.

        Empty dtype: float32.
        """
        without_memory = (
            (name, torch.empty(shape, dtype=getattr(torch, dtype or "float32"), device="meta"))
            for name, shape, dtype in metas
        )
        for name, tensor in self.named(without_memory):
            yield name, tuple(tensor.shape), dtype_name(tensor)


def regions_as_they_are(
    held: Iterable[TensorRegion], shapes: Mapping[str, Shape]
) -> Iterator[TensorRegion]:
    """Yield the regions unchanged."""
    del shapes
    yield from held


def regions_apart(
    held: Iterable[TensorRegion], shapes: Mapping[str, Shape]
) -> Iterator[TensorRegion]:
    """Yield regions of fused experts as regions of each expert's matrices, without a copy."""
    for each in held:
        found = _TOGETHER.fullmatch(each.name)
        if found is None or len(each.region.start) != _TOGETHER_AXES:
            yield each
            continue
        kinds = _KINDS[found[2]]
        _, rows, columns = shapes[each.name]
        part = rows // len(kinds)
        for number in range(each.region.start[0], each.region.stop[0]):
            for half, kind in enumerate(kinds):
                matrix = Region.at((number, half * part, 0), (1, part, columns))
                if common := each.region.intersection(matrix):
                    name = f"{found[1]}.{number}.{kind}_proj.weight"
                    first = common.start[1] - half * part, common.start[2]
                    region = Region.at(first, common.shape[1:])
                    yield TensorRegion(name, region, each.values[common.within(each.region)][0])


def regions_together(
    held: Iterable[TensorRegion], shapes: Mapping[str, Shape]
) -> Iterator[TensorRegion]:
    """Yield regions of the matrices of experts as regions of the fused ones, without a copy."""
    for each in held:
        found = _APART.fullmatch(each.name)
        if found is None:
            yield each
            continue
        experts, number, kind = found[1], int(found[2]), found[3]
        is_gated = f"{experts}.{number}.gate_proj.weight" in shapes
        name = "gate_up" if is_gated and kind != "down" else kind
        before = shapes[each.name][0] if is_gated and kind == "up" else 0
        row, column = each.region.start
        region = Region.at((number, row + before, column), (1, *each.region.shape))
        yield TensorRegion(f"{experts}.{name}_proj", region, each.values[None])


AS_THEY_ARE: Final = ExpertNames(iter, regions_as_they_are)
APART: Final = ExpertNames(split_experts, regions_apart)
TOGETHER: Final = ExpertNames(fuse_experts, regions_together)

_KINDS: Final = {"gate_up": ("gate", "up"), "up": ("up",), "down": ("down",)}


def _form(experts: str, matrices: Collection[tuple[str, int]]) -> tuple[int, bool]:
    """Return the number of experts and whether they have a gate.

    Raises:
        UnjoinedExperts: A matrix exists only for some of the experts.
    """
    count = 1 + max(number for _, number in matrices)
    is_gated = any(kind == "gate" for kind, _ in matrices)
    for number in range(count):
        for kind in ("gate", "up", "down") if is_gated else ("up", "down"):
            if (kind, number) not in matrices:
                raise UnjoinedExperts(experts, f"{number}.{kind}_proj")
    return count, is_gated


def _find_experts(name: str) -> str:
    """Return the layer's name prefix if the tensor belongs to an expert, else an empty string."""
    found = _APART.fullmatch(name)
    return "" if found is None else found[1]


def _place(name: str) -> tuple[str, int]:
    found = _APART.fullmatch(name)
    assert found is not None  # noqa: S101 -- ``_find_experts`` has checked it
    return found[3], int(found[2])

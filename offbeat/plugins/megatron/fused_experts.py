"""Experts that stand in a model's files as two tensors per layer, those of Qwen3-VL with experts.

    matrices    ....mlp.experts.3.gate_proj.weight [I, H], .up_proj.weight [I, H], .down_proj.weight [H, I]
    fused       ....mlp.experts.gate_up_proj [E, 2I, H], ....mlp.experts.down_proj [E, H, I]
    turned      the same names, [E, H, 2I] and [E, I, H]: the files of the hub

A rank holds boxes of matrices. transformers reads the fused and the turned form, and tells them apart by
their shapes, as it is done here.

Legend: E experts, I columns of one, H hidden.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# safetensors declares its files without types.

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from offbeat.trainers.expert_names import named_together
from offbeat.weight_sync.region import Region, Shape

_MATRIX: Final = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_HALVES: Final = {"gate": ("gate_up", 0), "up": ("gate_up", 1), "down": ("down", 0)}
_FUSED: Final = re.compile(r".+\.experts\.(gate_up|down)_proj")


def is_fused(name: str) -> bool:
    """Return whether a tensor of this name has a matrix of all experts of a layer."""
    return _FUSED.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class FusedPlace:
    """The place of a region of one expert's matrix in a fused tensor."""

    tensor: str
    region: Region
    is_turned: bool  # its last two axes are those of the matrix in reverse

    def of(self, values: Tensor) -> Tensor:
        """Return the region of the matrix from that of the fused tensor."""
        return values[0].mT if self.is_turned else values[0]


def fused_place(
    name: str, whole: Shape, region: Region, shapes: Mapping[str, Shape]
) -> FusedPlace | None:
    """Return where a region of an expert's matrix stands in files; None if in no fused tensor.

    Args:
        name: Name of the matrix.
        whole: Its shape.
        region: The region of it.
        shapes: Shapes of the tensors of the files.
    """
    if (found := _MATRIX.fullmatch(name)) is None:
        return None
    kind, half = _HALVES[found[3]]
    tensor, number = f"{found[1]}.{kind}_proj", int(found[2])
    if (shape := shapes.get(tensor)) is None:
        return None
    rows, columns = whole
    halves = 2 if kind == "gate_up" else 1
    is_turned = shape[1:] != (halves * rows, columns)
    row, column = region.start
    start, size = (row + half * rows, column), region.shape
    if is_turned:
        start, size = start[::-1], size[::-1]
    return FusedPlace(tensor, Region.at((number, *start), (1, *size)), is_turned)


def as_in_files(
    named: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with the experts of each layer in the form of the files whose shapes these are."""
    if not any(map(is_fused, shapes)):
        yield from named
        return
    for name, each in named_together(named):
        is_turned = is_fused(name) and tuple(each.shape) != shapes[name]
        yield name, each.mT.contiguous() if is_turned else each

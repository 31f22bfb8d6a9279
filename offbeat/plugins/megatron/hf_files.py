"""Reads the weights of a Hugging Face directory box by box.

The files of some models, such as Qwen3-VL with experts, store a layer's experts as two tensors.

    matrices    ....mlp.experts.3.gate_proj.weight [I, H], .up_proj.weight [I, H], .down_proj.weight [H, I]
    fused       ....mlp.experts.gate_up_proj [E, 2I, H], ....mlp.experts.down_proj [E, H, I]
    turned      the same names, [E, H, 2I] and [E, I, H]: the files of the hub

A rank holds boxes of matrices. transformers reads the fused and the turned form, and tells them
apart by their shapes. So does this module.

Legend: E experts, I columns of one, H hidden.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# safetensors declares its files without types.

import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from offbeat.models.loading import check_finite
from offbeat.plugins.megatron.errors import IncompleteWeights
from offbeat.plugins.megatron.mapping import TensorBox
from offbeat.trainers.checkpoints.weight_files import INDEX, SINGLE
from offbeat.trainers.expert_names import fuse_experts
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
        """Return the region of the matrix from the region of the fused tensor."""
        return values[0].mT if self.is_turned else values[0]


def find_fused_place(
    name: str, whole: Shape, region: Region, shapes: Mapping[str, Shape]
) -> FusedPlace | None:
    """Return the place of an expert's region in the files, or None if not in a fused tensor.

    Args:
        name: Name of the matrix.
        whole: Its shape.
        region: Its region.
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
    """Yield tensors with the experts of each layer in the form of files with these shapes."""
    if not any(map(is_fused, shapes)):
        yield from named
        return
    for name, each in fuse_experts(named):
        is_turned = is_fused(name) and tuple(each.shape) != shapes[name]
        yield name, each.mT.contiguous() if is_turned else each


NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


class HfWeights:
    """The tensors of a directory's safetensors files, read on demand."""

    def __init__(self, path: Path, opened: dict[str, Any], file_names: Mapping[str, str]) -> None:
        self._path, self._opened, self._file_names = path, opened, file_names
        self._fused: dict[str, Shape] = {
            name: tuple(handle.get_slice(name).get_shape())
            for name, handle in opened.items()
            if is_fused(name)
        }

    def read(self, box: TensorBox) -> Tensor:
        """Return the elements of a box, on the CPU, in the file's dtype.

        Raises:
            IncompleteWeights: The tensor is missing or has a different shape.
        """
        name = self._file_names.get(box.tensor, box.tensor)
        fused = find_fused_place(name, box.whole, box.region, self._fused)
        if fused is not None:
            return fused.of(self._opened[fused.tensor].get_slice(fused.tensor)[fused.region.slices])
        if name not in self._opened:
            raise IncompleteWeights(str(self._path), box.tensor, "is missing")
        view = self._opened[name].get_slice(name)
        if tuple(view.get_shape()) != box.whole:
            problem = f"has shape {tuple(view.get_shape())}, not {box.whole}"
            raise IncompleteWeights(str(self._path), box.tensor, problem)
        return view[box.region.slices]


@contextmanager
def hf_weights(path: Path, file_names: Mapping[str, str] = NO_NAMES) -> Generator[HfWeights]:
    """Yield the weights of a directory while its files are open.

    ``file_names``: names in the files, for tensors that have different names in the model.
    """
    index = path / INDEX
    files = [SINGLE]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    with ExitStack() as stack:
        opened = dict[str, Any]()
        for file in files:
            if not (path / file).exists():
                raise IncompleteWeights(str(path), file, "is missing")
            handle = stack.enter_context(safe_open(path / file, framework="pt"))
            opened |= dict.fromkeys(handle.keys(), handle)
        yield HfWeights(path, opened, file_names)


@torch.no_grad()
def load_boxes(
    parameters: Mapping[str, Tensor],
    boxes: Sequence[TensorBox],
    path: Path,
    file_names: Mapping[str, str] = NO_NAMES,
) -> None:
    """Fill parameters from a Hugging Face directory. Rows that pad the vocabulary become zero.

    Raises:
        IncompleteWeights: A tensor is missing or has a different shape.
        WeightsNotFinite: A weight is NaN or infinite.
    """
    for each in parameters.values():
        each.zero_()
    with hf_weights(path, file_names) as weights:
        for box in boxes:
            filled = view_box(parameters, box).copy_(weights.read(box))
            check_finite(path, box.tensor, filled)


def view_box(parameters: Mapping[str, Tensor], box: TensorBox) -> Tensor:
    """Return a view of the box's elements in the local parameter that holds them."""
    return parameters[box.parameter][box.local.slices]

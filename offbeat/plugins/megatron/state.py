"""A rank's share of a trainer's state in one file, in Hugging Face's coordinates.

The files of all ranks are in one directory. A reader loads the boxes that overlap its own, so a
state can be loaded under a different layout than it was written under.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import torch
from torch import Tensor

from offbeat.plugins.megatron.errors import IncompleteWeights
from offbeat.plugins.megatron.hf_files import view_box
from offbeat.plugins.megatron.mapping import TensorBox
from offbeat.trainers.checkpoints.weight_files import open_tensors, save_tensors
from offbeat.weight_sync.region import Region, Shape

WEIGHTS: Final = "weight"
_STEPS: Final = "steps"
_WHOLE: Final = "whole/"
_FILES: Final = "share-*.safetensors"

Kinds = Mapping[str, Mapping[str, Tensor]]
"""Tensors by kind (weights, moments), then by the local parameter's name."""


def save_share(
    directory: Path,
    rank: int,
    boxes: Sequence[TensorBox],
    kinds: Kinds,
    steps: int,
    whole: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write the boxes that this rank owns, of every kind that has them (a buffer has no moments).

    ``whole``: further tensors by name, which are equal on all ranks.

    Raises:
        OSError: The disk failed.
    """
    tensors = {
        f"{kind}/{box.tensor}@{','.join(map(str, box.region.start))}": view_box(
            values, box
        ).detach()
        for kind, values in kinds.items()
        for box in boxes
        if box.parameter in values
    }
    tensors |= {f"{_WHOLE}{name}": each for name, each in whole.items()}
    tensors[_STEPS] = torch.tensor(steps)
    save_tensors(tensors, directory / f"share-{rank:05}.safetensors")


class SavedShares:
    """Reads the files of all ranks of a state, with one tensor in memory at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._stack = directory, ExitStack()
        self._saved = dict[tuple[str, str], list[tuple[Shape, Callable[[], Tensor]]]]()
        self._whole = dict[str, Callable[[], Tensor]]()
        self.steps = 0

    def __enter__(self) -> Self:
        files = sorted(self._directory.glob(_FILES))
        if not files:
            raise IncompleteWeights(str(self._directory), _FILES, "is missing")
        for file in files:
            opened = self._stack.enter_context(open_tensors(file))
            self.steps = int(opened.get_tensor(_STEPS))
            for key in opened.keys():  # noqa: SIM118 -- no mapping
                read = partial(opened.get_tensor, key)
                if key.startswith(_WHOLE):
                    self._whole[key.removeprefix(_WHOLE)] = read
                elif key != _STEPS:
                    kind, name, start = _parse_key(key)
                    self._saved.setdefault((kind, name), []).append((start, read))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def whole(self, name: str) -> Tensor:
        """Return a tensor that is equal on all ranks.

        Raises:
            IncompleteWeights: It is in no file.
        """
        if name not in self._whole:
            raise IncompleteWeights(str(self._directory), name, "is missing")
        return self._whole[name]()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by Hugging Face name.

        Raises:
            IncompleteWeights: An element of a weight is in no file.
        """
        for (kind, name), saved in self._saved.items():
            if kind != WEIGHTS:
                continue
            pieces = [
                (Region.at(start, tuple(piece.shape)), piece)
                for start, read in saved
                for piece in [read()]
            ]
            stops = [region.stop for region, _ in pieces]
            shape = tuple(max(each) for each in zip(*stops, strict=True))
            whole = torch.empty(shape, dtype=pieces[0][1].dtype)
            if missing := _fill(whole, Region.whole(shape), pieces):
                problem = f"lacks {missing} elements of its {WEIGHTS}"
                raise IncompleteWeights(str(self._directory), name, problem)
            yield name, whole

    @torch.no_grad()
    def fill(self, kind: str, values: Mapping[str, Tensor], boxes: Iterable[TensorBox]) -> None:
        """Copy the elements of the boxes, for one kind, into ``values``.

        Raises:
            IncompleteWeights: An element of a box is in no file.
        """
        wanted = dict[str, list[TensorBox]]()
        for box in boxes:
            wanted.setdefault(box.tensor, []).append(box)
        for name, theirs in wanted.items():
            pieces = [
                (Region.at(start, tuple(piece.shape)), piece)
                for start, read in self._saved.get((kind, name), [])
                for piece in [read()]
            ]
            for box in theirs:
                missing = _fill(view_box(values, box), box.region, pieces)
                if missing:
                    problem = f"lacks {missing} elements of its {kind}"
                    raise IncompleteWeights(str(self._directory), name, problem)


def _fill(target: Tensor, region: Region, pieces: Iterable[tuple[Region, Tensor]]) -> int:
    """Copy the overlap of pieces with a region. Return the number of elements that no piece has."""
    missing = region.elements
    for held, piece in pieces:
        if common := region.intersection(held):
            target[common.within(region)].copy_(piece[common.within(held)])
            missing -= common.elements
    return missing


def _parse_key(key: str) -> tuple[str, str, Shape]:
    kind, _, rest = key.partition("/")
    name, _, start = rest.rpartition("@")
    return kind, name, tuple(map(int, start.split(",")))

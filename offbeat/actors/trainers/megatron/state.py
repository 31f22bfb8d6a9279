"""A rank's share of a trainer's state in one file, in Hugging Face's coordinates.

The files of all ranks lie in one directory. Whoever reads them takes the boxes that overlap its own,
so that a state can be taken up under another layout than it was written under.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from offbeat.actors.trainers.megatron.errors import IncompleteWeights
from offbeat.actors.trainers.megatron.hf_files import view_of, where
from offbeat.actors.trainers.megatron.mapping import Box, Shape
from offbeat.actors.trainers.state_files import save_tensors, saved_tensors

WEIGHTS: Final = "weight"
_STEPS: Final = "steps"
_FILES: Final = "share-*.safetensors"

Kinds = Mapping[str, Mapping[str, Tensor]]
"""By kind (weights, moments), then by the local parameter's name."""


def save_share(directory: Path, rank: int, boxes: Sequence[Box], kinds: Kinds, steps: int) -> None:
    """Write the boxes this rank answers for, of every kind.

    Raises:
        OSError: The disk refused.
    """
    tensors = {
        f"{kind}/{box.tensor}@{_text(box.start)}": view_of(values, box).detach()
        for kind, values in kinds.items()
        for box in boxes
    }
    tensors[_STEPS] = torch.tensor(steps)
    save_tensors(tensors, directory / f"share-{rank:05}.safetensors")


class SavedShares:
    """The files of all ranks of a state, while they are open."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._stack = directory, ExitStack()
        self._saved = dict[tuple[str, str], list[_Saved]]()
        self.steps = 0

    def __enter__(self) -> Self:
        files = sorted(self._directory.glob(_FILES))
        if not files:
            raise IncompleteWeights(str(self._directory), _FILES, "is missing")
        for file in files:
            tensors = self._stack.enter_context(saved_tensors(file))
            self.steps = int(tensors[_STEPS])
            for key in tensors:
                if key != _STEPS:
                    kind, name, start = _parsed(key)
                    self._saved.setdefault((kind, name), []).append(_Saved(tensors, key, start))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @torch.no_grad()
    def fill(self, kind: str, values: Mapping[str, Tensor], boxes: Iterable[Box]) -> None:
        """Copy everything of a kind that the boxes ask for.

        Raises:
            IncompleteWeights: An element of a box is in no file.
        """
        for box in boxes:
            target, filled = view_of(values, box), 0
            for saved in self._saved.get((kind, box.tensor), []):
                for there, here, count in _overlap(box, saved):
                    target[here].copy_(saved.tensor[there])
                    filled += count
            if filled != target.numel():
                problem = f"lacks {target.numel() - filled} elements of its {kind}"
                raise IncompleteWeights(str(self._directory), box.tensor, problem)


@dataclass(slots=True)
class _Saved:
    tensors: Mapping[str, Tensor]
    key: str
    start: Shape
    _read: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        if self._read is None:
            self._read = self.tensors[self.key]
        return self._read


Slices = tuple[slice, ...]


def _overlap(box: Box, saved: _Saved) -> Iterator[tuple[Slices, Slices, int]]:
    """Where box and saved box meet, in the coordinates of each; nothing where they do not."""
    shape = tuple(saved.tensor.shape)
    low = tuple(map(max, box.start, saved.start))
    box_end = tuple(map(sum, zip(box.start, box.shape, strict=True)))
    saved_end = tuple(map(sum, zip(saved.start, shape, strict=True)))
    size = tuple(min(a, b) - c for a, b, c in zip(box_end, saved_end, low, strict=True))
    if min(size) > 0:
        there = tuple(a - b for a, b in zip(low, saved.start, strict=True))
        here = tuple(a - b for a, b in zip(low, box.start, strict=True))
        yield where(there, size), where(here, size), prod(size)


def _text(start: Shape) -> str:
    return ",".join(map(str, start))


def _parsed(key: str) -> tuple[str, str, Shape]:
    kind, _, rest = key.partition("/")
    name, _, start = rest.rpartition("@")
    return kind, name, tuple(map(int, start.split(",")))

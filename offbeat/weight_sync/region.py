"""Regions of a tensor, and the cuts that sharding makes. Pure.

A region is a half-open box in the coordinates of the Hugging Face tensor. Every layout lists the
regions that each rank holds or needs, so that two layouts can be compared element by element.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Region(NamedTuple):
    """Elements from ``start`` to ``stop``, exclusive, on every axis."""

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Shape) -> "Region":
        """Return the region of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @classmethod
    def at(cls, start: Shape, shape: Shape) -> "Region":
        """Return the region of this shape that begins at ``start``."""
        return cls(start, tuple(first + size for first, size in zip(start, shape, strict=True)))

    def __str__(self) -> str:
        spans = zip(self.start, self.stop, strict=True)
        return f"[{', '.join(f'{start}:{stop}' for start, stop in spans)}]"

    @property
    def shape(self) -> Shape:
        return tuple(
            max(0, stop - start) for start, stop in zip(self.start, self.stop, strict=True)
        )

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this region in an array of the whole tensor."""
        return tuple(map(slice, self.start, self.stop))

    def contains(self, other: "Region") -> bool:
        """Return whether every element of ``other`` is in this region."""
        return all(
            start <= theirs for start, theirs in zip(self.start, other.start, strict=True)
        ) and all(theirs <= stop for stop, theirs in zip(self.stop, other.stop, strict=True))

    def intersection(self, other: "Region") -> "Region | None":
        """Return the common elements, or None if the regions are disjoint."""
        start = tuple(max(pair) for pair in zip(self.start, other.start, strict=True))
        stop = tuple(min(pair) for pair in zip(self.stop, other.stop, strict=True))
        found = Region(start, stop)
        return found if found.elements else None

    def within(self, outer: "Region") -> tuple[slice, ...]:
        """Return the index of this region in an array that holds ``outer``."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.start, self.stop, outer.start, strict=True)
        )

    def slice_rows(self, max_elements: int) -> list["Region"]:
        """Cut along the first axis into regions of at most ``max_elements``, or of one row each."""
        rows = self.shape[0] if self.start else 1
        if self.elements <= max_elements or rows <= 1:
            return [self]
        step = max(1, max_elements * rows // self.elements)
        first, last = self.start[0], self.stop[0]
        return [
            Region((at, *self.start[1:]), (min(at + step, last), *self.stop[1:]))
            for at in range(first, last, step)
        ]


def chunk_cuts(length: int, parts: int) -> list[int]:
    """Return the ``parts + 1`` cuts that ``torch.chunk`` makes.

    They bound equal parts, then a shorter part, then empty parts.
    """
    size = -(-length // parts)
    return [min(length, size * part) for part in range(parts + 1)]


def cut_part(shape: Shape, axis: int, cuts: Sequence[int], part: int) -> Region:
    """Return the region between two neighbouring cuts of one axis."""
    start, stop = [0] * len(shape), list(shape)
    start[axis], stop[axis] = cuts[part], cuts[part + 1]
    return Region(tuple(start), tuple(stop))


def union_elements(regions: Iterable[Region]) -> int:
    """Count the elements that are in at least one region."""
    some = [region for region in regions if region.elements]
    if not some or not some[0].start:
        return len(some[:1])
    axes = range(len(some[0].start))
    cuts = [sorted({end for each in some for end in (each.start[a], each.stop[a])}) for a in axes]
    covered = np.zeros([len(each) - 1 for each in cuts], bool)
    for region in some:
        at = [
            slice(cuts[axis].index(region.start[axis]), cuts[axis].index(region.stop[axis]))
            for axis in axes
        ]
        covered[tuple(at)] = True
    sizes = np.ones((), np.int64)
    for each in cuts:
        sizes = np.multiply.outer(sizes, np.diff(each))
    return int(sizes[covered].sum())


Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Regions of a tensor on one side of a sync, each with the ranks that have a copy.

    Tensors with equal cuts share one object, which is compared by identity. So a plan for 100,000
    tensors needs to cut only a few hundred.
    """

    parts: tuple[tuple[Region, Ranks], ...]

    def at(self, rank: int) -> list[Region]:
        """Return the regions of one rank."""
        return [region for region, ranks in self.parts if rank in ranks]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """Tensor of a model with its placement on the senders and on the receivers."""

    name: str  # Hugging Face name
    shape: Shape
    itemsize: int  # bytes of an element on the wire
    source: Placement
    target: Placement
    kind: str = "dense"  # class under which its bytes are counted
    split: bool = True
    """Whether a region may be cut further. A tensor that was quantised as a whole must not be."""

    @property
    def nbytes(self) -> int:
        return Region.whole(self.shape).elements * self.itemsize

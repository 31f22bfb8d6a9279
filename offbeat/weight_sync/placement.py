"""Placement of a tensor: which ranks hold, or need, which regions of it. Pure."""

from dataclasses import dataclass

from offbeat.weight_sync.region import Region, Shape

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The regions of a tensor on one side of a sync, each with the ranks that have a copy of it.

    Tensors that are cut alike share one object, which is compared by identity: a plan of 100,000
    tensors then cuts a few hundred.
    """

    parts: tuple[tuple[Region, Ranks], ...]

    def at(self, rank: int) -> list[Region]:
        """Return the regions of one rank."""
        return [region for region, ranks in self.parts if rank in ranks]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of a model with its placement on the senders and on the receivers."""

    name: str  # Hugging Face name
    shape: Shape
    itemsize: int  # bytes of an element on the wire
    source: Placement
    target: Placement
    kind: str = "dense"  # class under which its bytes are counted
    split: bool = True
    """Whether senders may share a region; what is quantised as a whole may not be cut further."""

    @property
    def nbytes(self) -> int:
        return Region.whole(self.shape).elements * self.itemsize

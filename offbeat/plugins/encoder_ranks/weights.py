"""Weights of a model of which each rank holds a part of one side."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Iterator, Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.plugins.encoder_ranks.layout import Grid
from offbeat.plugins.encoder_ranks.sides import Inventory
from offbeat.trainers.sides import Side
from offbeat.trainers.torch.rank_mesh import RankMesh, mesh_of_side
from offbeat.trainers.torch.sharding import Weights, own

_FIRST: Final = 0


def side_mesh(device: str, grid: Grid, timeout_s: float) -> RankMesh:
    """Return the axes of the ranks that hold the same side as this one. All ranks call it together.

    ``timeout_s``: how long a collective of a side waits for a rank. torch's own default, half an hour,
    does not follow that of the world.
    """
    sides = [(grid.ranks_of(each), grid.tensor_ranks_of(each)) for each in Side]
    return mesh_of_side(device, sides, timeout_s)


class GridWeights(Weights):
    """All weights of a model under their Hugging Face names, in its order, from one of its ranks."""

    def __init__(self, inventory: Inventory, held: Weights, grid: Grid, rank: int) -> None:
        """``held``: the weights of this rank's side."""
        self._inventory, self._held, self._grid, self._rank = inventory, held, grid, rank

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights on rank 0; on others, those of the other side without memory.

        All ranks iterate together, and to the end.
        """
        side, speaker = self._grid.side_of(self._rank), self._grid.ranks_of(Side.TOWER)[0]
        mine, parts = self._held.named(), self.local_tensors().values()
        device = own(next(iter(parts))).device
        for each in self._inventory.weights:
            if each.side is side:
                _, whole = next(mine)
            else:
                place = device if self._rank == _FIRST else torch.device("meta")
                whole = torch.empty(each.shape, dtype=each.dtype, device=place)
            if each.side is Side.TOWER and self._rank == speaker:
                dist.send(whole.contiguous(), _FIRST)
            elif each.side is Side.TOWER and self._rank == _FIRST:
                dist.recv(whole, speaker)
            yield each.name, whole
        for _ in mine:  # what is gathered last is given back
            pass

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of each weight of its side."""
        return self._held.local_tensors()

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield name, whole shape and dtype of each weight of the model."""
        for each in self._inventory.weights:
            yield each.name, each.shape, str(each.dtype).removeprefix("torch.")

    def buffers(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        for each in self._inventory.buffers:
            yield each.name, each.shape, each.dtype

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Copy whole weights into this rank's parts."""
        self._held.fill(values)

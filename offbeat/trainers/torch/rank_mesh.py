"""Ranks of a sharded model on two axes: data-parallel ranks, and tensor-parallel ranks within each.

Rank ``d * tensor + t`` is tensor rank ``t`` of replica ``d``. Every collective of a step runs along
one axis: FSDP2 gathers and reduces over ``data``, divided matrices over ``tensor``.
"""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

DATA: Final = "data"
TENSOR: Final = "tensor"


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The two axes, seen from one rank."""

    data: DeviceMesh  # ranks that hold the same part of divided matrices; FSDP2 shards over them
    tensor: DeviceMesh | None = None  # ranks of one replica; None: a replica is one rank

    def is_copied(self, parameter: Tensor) -> bool:
        """Return whether every tensor rank holds the same part of a sharded parameter."""
        if self.tensor is None:
            return False
        assert isinstance(parameter, DTensor)  # noqa: S101 -- FSDP2 makes them of all
        names = parameter.device_mesh.mesh_dim_names or ()
        return TENSOR not in names or parameter.placements[names.index(TENSOR)].is_replicate()

    def counts(self, parameter: Tensor) -> bool:
        """Return whether this rank counts its part of a parameter: one of its copies does."""
        is_first = self.tensor is None or self.tensor.get_local_rank() == 0
        return is_first or not self.is_copied(parameter)

    def equalise(self, gradients: Sequence[Tensor]) -> None:
        """Give the copies of a gradient the first tensor rank's bits. All tensor ranks call it.

        They are equal but for rounding: kernels that add in no fixed order round differently on each
        rank, and copies of a weight would drift apart over many steps.
        """
        if self.tensor is not None:
            for each in gradients:
                dist.broadcast(each, group=self.tensor.get_group(), group_src=0)


def rank_mesh(device: str, ranks: int, tensor: int, timeout_s: float) -> RankMesh:
    """Return the axes of a world. All of its ranks call it together.

    Args:
        device: Device of the ranks, such as ``cuda``.
        ranks: Number of ranks; ``tensor`` divides it.
        tensor: Number of tensor-parallel ranks of a replica.
        timeout_s: How long a collective along an axis waits for a rank. torch's own default, half an
            hour, does not follow that of the world.
    """
    if tensor == 1:
        return RankMesh(init_device_mesh(_kind(device), (ranks,)))
    return mesh_of_side(device, [(range(ranks), tensor)], timeout_s)


def mesh_of_side(
    device: str, sides: Sequence[tuple[Sequence[int], int]], timeout_s: float
) -> RankMesh:
    """Return the axes of the side that holds this rank. All ranks of the world call it together.

    Args:
        device: Device of the ranks.
        sides: By side its ranks, and how many consecutive ones of them are tensor-parallel.
        timeout_s: As of ``rank_mesh``.
    """
    meshes = [_mesh(device, ranks, tensor, timeout_s) for ranks, tensor in sides]
    return next(each for each in meshes if each is not None)


def _mesh(device: str, ranks: Sequence[int], tensor: int, timeout_s: float) -> RankMesh | None:
    """Make the process groups of a side; return its axes if this rank is one of it."""
    replicas = [list(ranks[first : first + tensor]) for first in range(0, len(ranks), tensor)]
    alike = [list(ranks[place::tensor]) for place in range(tensor)]
    data = _own_group(alike, timeout_s)
    if tensor == 1:
        return None if data is None else RankMesh(DeviceMesh.from_group(data, _kind(device)))
    replica = _own_group(replicas, timeout_s)
    if data is None:
        return None
    mesh = DeviceMesh.from_group(
        [data, replica],
        _kind(device),
        mesh=torch.tensor(replicas),
        mesh_dim_names=(DATA, TENSOR),
    )
    return RankMesh(mesh[DATA], mesh[TENSOR])


def _own_group(groups: Sequence[list[int]], timeout_s: float) -> Any:  # noqa: ANN401 -- torch does not type it
    """Make a process group of each list of ranks; return the one with this rank, or None."""
    patience, rank = timedelta(seconds=timeout_s), dist.get_rank()
    made = [(ranks, dist.new_group(ranks, timeout=patience)) for ranks in groups]
    return next((group for ranks, group in made if rank in ranks), None)


def _kind(device: str) -> str:
    return device.partition(":")[0]

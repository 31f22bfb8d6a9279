"""Interface of the plug-in that divides the matrices of a model over several ranks."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from offbeat.doors import find_only
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch.proof import Witness
from offbeat.trainers.torch.sharding import RankMesh


class SizeNames(NamedTuple):
    """Names of the settings for the parallel sizes, for errors."""

    tensor: str
    encoders: str


RECIPE_NAMES: Final = SizeNames("trainer.tensor_parallel", "trainer.encoder")


class MatrixDivision(Protocol):
    """Divides matrices over the ranks of a replica: the tensor ranks."""

    def plan(
        self,
        model: PreTrainedModel,
        ranks: int,
        *,
        holds_tower: bool = True,
        names: SizeNames = RECIPE_NAMES,
    ) -> dict[str, str]:
        """Return the kind of division by module name. Only names and sizes are read.

        Args:
            model: A causal LM. It may have no memory for its weights.
            ranks: Number of tensor ranks.
            holds_tower: Whether the ranks also hold the vision tower, if the model has one.
            names: Names of the settings to change, for errors.

        Raises:
            UntrainableModel: The model cannot be divided over so many ranks.
        """
        ...

    def cut_axis(self, plan: Mapping[str, str], weight: str, axes: int) -> int | None:
        """Return the axis along which a plan divides a weight or bias, or None if it is whole."""
        ...

    def divide(self, model: PreTrainedModel, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
        """Divide a plan's matrices over the ranks of a mesh, in place.

        All of its ranks must call it.
        """
        ...

    def check_same_rows(
        self, peers: Peers, tensor: int, during: str, microbatches: Sequence[PackedRows]
    ) -> None:
        """Check that the tensor ranks of each replica read the same microbatches.

        All ranks must call it.

        Raises:
            OffbeatError: Ranks of a replica read different microbatches. All ranks raise it.
        """
        ...

    def prove_copies(
        self,
        model: PreTrainedModel,
        witness: Witness,
        dtype: torch.dtype,
        mesh: RankMesh,
        peers: Peers,
    ) -> None:
        """Prove that tensor ranks get the whole gradient of each weight that all of them hold.

        All ranks must call it together, before an optimizer exists. It leaves no gradient.

        Raises:
            UntrainableModel: The gradients of a weight's copies differ. All ranks raise it.
        """
        ...


def find_division() -> MatrixDivision:
    """Return the plug-in that divides matrices.

    Raises:
        PluginUnusable: No package provides the plug-in, or its import fails.
    """
    return cast("MatrixDivision", find_only("division"))

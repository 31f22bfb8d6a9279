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
    """Names under which a reader of an error sets the parallel sizes."""

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
        """Return the kind of division by module name. It reads only names and sizes.

        Args:
            model: A causal LM, which may be without memory.
            ranks: Number of tensor ranks.
            holds_tower: Whether its ranks hold the vision tower, too, if it has one.
            names: Names of the sizes that are to be changed.

        Raises:
            UntrainableModel: So many ranks cannot divide the model.
        """
        ...

    def cut_axis(self, plan: Mapping[str, str], weight: str, axes: int) -> int | None:
        """Return the axis along which a plan divides a weight or bias; None: each rank has it whole."""
        ...

    def divide(self, model: PreTrainedModel, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
        """Divide the matrices of a plan over the ranks of a mesh, in place. All of its ranks call it."""
        ...

    def check_same_rows(
        self, peers: Peers, tensor: int, during: str, microbatches: Sequence[PackedRows]
    ) -> None:
        """Check that the tensor ranks of each replica read the same microbatches. All ranks call it.

        Raises:
            OffbeatError: Ranks of a replica read other ones; on all ranks.
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
        """Prove that tensor ranks get the whole gradient of weights of which each has a copy.

        All ranks call it together, before there is an optimizer; it leaves no gradient.

        Raises:
            UntrainableModel: The gradients of a weight's copies differ; on all ranks.
        """
        ...


def find_division() -> MatrixDivision:
    """Return the plug-in that divides matrices.

    Raises:
        PluginUnusable: No package brings it, or its import fails.
    """
    return cast("MatrixDivision", find_only("division"))

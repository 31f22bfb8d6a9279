"""Ranks of the torch trainer that share each matrix of a model: ``trainer.tensor_parallel``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from offbeat.config.base import Config, of_kind
from offbeat.config.problems import Clash
from offbeat.messages.finding import Finding
from offbeat.trainers.trainer_plugin import TrainerPart

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from offbeat.config.run import RunConfig
    from offbeat.trainers.batches.packing import PackedRows
    from offbeat.trainers.ranks.peers import Peers
    from offbeat.trainers.torch.matrix_division import SizeNames
    from offbeat.trainers.torch.proof import Witness
    from offbeat.trainers.torch.sharding import RankMesh


class TensorRanks(TrainerPart):
    """Divides matrices by the plan in the model's config."""

    key = "tensor_parallel"

    def is_used(self, trainer: Config) -> bool:
        """Return whether several ranks of the torch trainer share each matrix."""
        from offbeat.config.sections.trainer import TorchTrainerConfig

        return isinstance(trainer, TorchTrainerConfig) and trainer.tensor_parallel > 1

    def find_clashes_of_real_runs(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that cannot work if several ranks share each matrix."""
        from offbeat.config.sections.trainer import TorchTrainerConfig
        from offbeat.plugins.tensor_ranks.clashes import tensor_clashes

        yield from tensor_clashes(config, of_kind(TorchTrainerConfig, config.trainer))

    def check(self, config: "RunConfig", gpu: int | None) -> Iterator[Finding]:
        """Check the model's plan, and that a rank can hold its part."""
        from offbeat.config.sections.trainer import TorchTrainerConfig
        from offbeat.plugins.tensor_ranks.checks import check_tensor_ranks

        yield from check_tensor_ranks(config, of_kind(TorchTrainerConfig, config.trainer), gpu)

    # --- interface for the torch trainer ----------------------------------------------------------

    def plan(
        self,
        model: "PreTrainedModel",
        ranks: int,
        *,
        holds_tower: bool = True,
        names: "SizeNames | None" = None,
    ) -> dict[str, str]:
        """Return the kind of division by module name.

        Raises:
            UntrainableModel: This number of ranks cannot divide the model.
        """
        from offbeat.plugins.tensor_ranks.tensor_parallel import tensor_plan
        from offbeat.trainers.torch.matrix_division import RECIPE_NAMES

        return tensor_plan(model, ranks, holds_tower=holds_tower, names=names or RECIPE_NAMES)

    def cut_axis(self, plan: Mapping[str, str], weight: str, axes: int) -> int | None:
        """Return the axis along which a plan divides a weight, or None if it stays whole."""
        from offbeat.plugins.tensor_ranks.tensor_parallel import cut_axis

        return cut_axis(plan, weight, axes)

    def divide(self, model: "PreTrainedModel", mesh: "DeviceMesh", plan: Mapping[str, str]) -> None:
        """Divide the matrices of a plan over the ranks of a mesh, in place."""
        from offbeat.plugins.tensor_ranks.tensor_parallel import divide

        divide(model, mesh, plan)

    def check_same_rows(
        self, peers: "Peers", tensor: int, during: str, microbatches: "Sequence[PackedRows]"
    ) -> None:
        """Check that the tensor ranks of each replica read the same microbatches.

        Raises:
            ReplicaRowsDiffer: Ranks of a replica read different ones. Raised on all ranks.
        """
        from offbeat.plugins.tensor_ranks.tensor_proof import check_same_rows

        check_same_rows(peers, tensor, during, microbatches)

    def prove_copies(
        self,
        model: "PreTrainedModel",
        witness: "Witness",
        dtype: "torch.dtype",
        mesh: "RankMesh",
        peers: "Peers",
    ) -> None:
        """Prove that tensor ranks get the whole gradient of each weight that all of them hold.

        Raises:
            UntrainableModel: The gradients of a weight's copies differ. Raised on all ranks.
        """
        from offbeat.plugins.tensor_ranks.tensor_proof import prove_copies

        prove_copies(model, witness, dtype, mesh, peers)


PART: Final = TensorRanks()

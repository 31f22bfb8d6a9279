"""Checks that a replica's tensor-parallel ranks compute one step: same rows, same gradients.

A model's plan determines which weights stay whole, and where their gradients must be summed over
the tensor ranks. If it missed a sum, the logprobs would still be right. But each rank's copy of a
weight would get a different part of the gradient.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.messages.failures import OffbeatError
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch.forward import compute_packed_logprobs
from offbeat.trainers.torch.proof import Witness
from offbeat.trainers.torch.sharding import RankMesh, class_name, own

_TOLERANCE: Final = 0.1
"""Largest difference between copies of a gradient, relative to the largest value of the first.

Copies differ by rounding, because kernels add in no fixed order: by at most a percent in 16 bits.
If a sum over ranks is missing, copies differ by as much as their own size.
"""

_GAPS: Final = msgspec.msgpack.Decoder(tuple[float, str])
_DIGESTS: Final = msgspec.msgpack.Decoder(str)


class ReplicaRowsDiffer(OffbeatError):
    """Tensor-parallel ranks of a replica got different groups, so their sums would be wrong.

    Fix: report it.
    """

    during: str
    first: int
    second: int

    def __str__(self) -> str:
        return (
            f"trainer ranks {self.first} and {self.second} share one replica but read "
            f"different rows in {self.during}: nothing was computed. Fix: groups are assigned to "
            "replicas, not to ranks"
        )


def check_same_rows(
    peers: Peers, tensor: int, during: str, microbatches: Sequence[PackedRows]
) -> None:
    """Check that the tensor ranks of each replica read the same microbatches.

    All ranks must call it.

    Raises:
        ReplicaRowsDiffer: Ranks of a replica read different ones. Raised on all ranks.
    """
    digest = xxhash.xxh3_128()
    for packed in microbatches:
        for each in (packed.input_ids_RT, packed.target_N, packed.source_N):
            digest.update(f"{each.dtype} {each.shape} ".encode())
            digest.update(each.tobytes())
    every = peers.all_gather(digest.hexdigest(), _DIGESTS)
    for rank, theirs in enumerate(every):
        leader = rank - rank % tensor
        if theirs != every[leader]:
            raise ReplicaRowsDiffer(during, leader, rank)


def prove_copies(
    model: PreTrainedModel, witness: Witness, dtype: torch.dtype, mesh: RankMesh, peers: Peers
) -> None:
    """Prove that all tensor ranks get the whole gradient of the weights that each of them holds.

    All ranks must call it together, before the optimizer is created. It leaves no gradient.

    Raises:
        UntrainableModel: The gradients of a weight's copies differ. Raised on all ranks.
    """
    total = compute_packed_logprobs(model, witness.pack_witness(model), 1.0, dtype).sum()
    check_copies(class_name(model), copies_gap(model, total, mesh), peers)


def copies_gap(model: PreTrainedModel, total: Tensor, mesh: RankMesh) -> tuple[float, str]:
    """Return the largest gap between copies of a gradient, relative to its maximum, and its name.

    All ranks of the mesh must call it together, before the optimizer is created. It leaves no
    gradient.

    Args:
        model: Divided over the tensor ranks of ``mesh``.
        total: Result of ``model`` as one number.
        mesh: The ranks.
    """
    total.backward()
    worst = (0.0, "")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and mesh.is_copied(parameter):
            gradient = own(parameter.grad)
            first = gradient.clone()
            mesh.equalise([first])
            if first.numel():
                apart = (gradient - first).abs().max() / first.abs().max().clamp(min=1e-30)
                gap = float(apart)
                worst = max(worst, (math.inf if math.isnan(gap) else gap, name))
    for parameter in model.parameters():
        parameter.grad = None
    return worst


def check_copies(
    model: str, worst: tuple[float, str], peers: Peers, setting: str = "trainer.tensor_parallel"
) -> None:
    """Check the result of ``copies_gap`` on every rank.

    All ranks of the world must call it together.

    Args:
        model: Name of the model's class.
        worst: Result on this rank. The gap is 0 on a rank without copies.
        peers: The ranks of the world.
        setting: Key of the recipe that divides the model.

    Raises:
        UntrainableModel: The gradients of a weight's copies differ. Raised on all ranks.
    """
    gap, name = max(peers.all_gather(worst, _GAPS))
    if not gap <= _TOLERANCE:
        problem = (
            f"is divided by a plan that gives tensor ranks different gradients of {name}, {gap:.2g} of its "
            "largest value apart"
        )
        raise UntrainableModel(model, problem, f"Set {setting} to 1")

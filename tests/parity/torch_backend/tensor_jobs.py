"""What tensor-parallel ranks are asked to do. Runs in workers only."""

from pathlib import Path

import torch
from parity_cases import TOKENS, Arrays, Cut, Step
from torch import Tensor
from torch_jobs import feed, gradients, make, nbytes
from transformers import PreTrainedModel

from offbeat.messages.fences import StepKey
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch import forward
from offbeat.trainers.torch.forward import chunk_head
from offbeat.trainers.torch.logprobs import find_share, token_logprobs_and_entropies
from offbeat.trainers.torch.sharding import own
from offbeat.trainers.trainer_plugin import RankBytes
from offbeat.weight_sync.region import Region


def held(
    peers: Peers, path: Path, cut: Cut, step: Step
) -> tuple[dict[str, Region], dict[str, tuple[int, ...]], RankBytes]:
    """This rank's regions of the weights, the shapes of what is there, and its bytes after a step."""
    trainer = make(peers, path, cut)
    key = feed(trainer, step, TOKENS, 1, StepKey(1, 1, 0))
    gradients = nbytes(each.grad for each in trainer.module.parameters() if each.grad is not None)
    trainer.finish_train_step(key)
    weights = nbytes([*trainer.module.parameters(), *trainer.module.buffers()])
    moments = nbytes(trainer.updates.moments().values())
    regions = trainer.held_regions()
    return (
        {each.name: each.region for each in regions},
        {each.name: tuple(each.values.shape) for each in regions},
        RankBytes(weights, gradients, moments),
    )


def rounded_otherwise(peers: Peers, path: Path, cut: Cut, step: Step) -> tuple[float, str]:
    """Norm and digest of a step in which each rank rounds gradients of the norms in its own way."""
    trainer = make(peers, path, cut)
    key = feed(trainer, step, TOKENS, 1, StepKey(1, 1, 0))
    for each in trainer.module.parameters():
        if each.ndim == 1:
            own(each.grad).mul_(1 + 1e-12 * peers.rank)
    result = trainer.finish_train_step(key)
    return result.grad_norm, trainer.weights_digest()


def heads_whole_and_in_chunks(peers: Peers, path: Path, cut: Cut, step: Step) -> list[Arrays]:
    """Gradients of logprobs and entropies, read of all places at once, and of three at a time."""
    trainer, seen = make(peers, path, cut), list[Arrays]()
    _, microbatches = trainer.passes.cut(step.groups, only_trained=True)
    for compute in (forward.compute_packed_logprobs_and_entropies, in_chunks):
        for packed in microbatches:
            logprobs_N, entropy_N = compute(trainer.module, packed, 0.7, torch.float64)
            weight_N = torch.arange(len(logprobs_N)) / len(logprobs_N)
            (logprobs_N * weight_N + entropy_N.square()).sum().backward()
        seen.append(gradients(trainer))
        trainer.updates.drop_gradients()
    return seen


def in_chunks(
    model: PreTrainedModel, packed: PackedRows, temperature: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    head = forward.output_head(model)

    def compute(logits_UV: Tensor, which_N: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs_and_entropies(
            logits_UV, which_N, target_N, temperature, find_share(head)
        )

    with chunk_head(head, packed, compute, places=3) as unpack:
        return unpack(forward._logits(model, packed, dtype))  # noqa: SLF001 -- the pass itself

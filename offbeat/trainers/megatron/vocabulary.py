"""Log-probabilities of tokens, and entropies, from logits sharded over tensor-parallel ranks.

Legend: U positions with logits, V columns of this rank, N tokens, each predicted by one position.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# megatron-core has no types.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from offbeat.trainers.torch.logprobs import NEVER, scale


def vocabulary_logprobs(
    logits_UV: Tensor,
    which_N: Tensor,
    target_N: Tensor,
    temperature: float,
    vocabulary: int,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Compute ``log softmax(logits / temperature)[which, target]`` and the entropy of that softmax.

    Both are equal on all ranks of ``group``, and have a gradient. Columns behind the vocabulary are
    padding: they are ignored, and their gradient is zero. Four small reductions forward, none
    backward.

    Args:
        logits_UV: [U, V] floating: this rank's columns; rank r has those from ``r * V`` on.
        which_N: [N] int64: index of the position that predicts each token.
        target_N: [N] int64: token ids of the whole vocabulary.
        temperature: Temperature of the softmax.
        vocabulary: Number of columns over all ranks, without padding.
        group: The tensor-parallel ranks.

    Returns:
        [N] natural logs and [N] nats, float32, or float64 for float64 logits.
    """
    first = dist.get_rank(group) * logits_UV.shape[1]
    own_UV = logits_UV[:, : max(0, vocabulary - first)]
    return _Logprobs.apply(own_UV, which_N, target_N - first, temperature, group)  # pyright: ignore[reportReturnType]


def whole_logits(logits_UV: Tensor, vocabulary: int, group: ProcessGroup) -> Tensor:
    """Gather logits [U, vocabulary] from each rank's columns [U, V], on every rank of ``group``."""
    parts = [torch.empty_like(logits_UV) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits_UV.contiguous(), group=group)
    return torch.cat(parts, -1)[:, :vocabulary]


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch does not type what it saves on it
        logits_UV: Tensor,
        which_N: Tensor,
        target_N: Tensor,
        temperature: float,
        group: ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        scaled_UV = scale(logits_UV, temperature)
        empty_U = scaled_UV.new_full((scaled_UV.shape[0],), -torch.inf)
        largest_U = scaled_UV.amax(dim=-1) if scaled_UV.shape[1] else empty_U
        dist.all_reduce(largest_U, ReduceOp.MAX, group)
        shifted_UV = (scaled_UV - largest_U[:, None]).clamp_(min=NEVER)
        share_UV = shifted_UV.exp()
        sum_U = share_UV.sum(dim=-1)
        dist.all_reduce(sum_U, ReduceOp.SUM, group)
        mean_U = share_UV.mul_(shifted_UV).sum(dim=-1)
        dist.all_reduce(mean_U, ReduceOp.SUM, group)
        total_U, entropy_U = sum_U.log() + largest_U, sum_U.log() - mean_U / sum_U
        own_N = (target_N >= 0) & (target_N < scaled_UV.shape[1])
        chosen_N = scaled_UV.new_zeros(len(target_N))
        chosen_N[own_N] = scaled_UV[which_N[own_N], target_N[own_N]]
        dist.all_reduce(chosen_N, ReduceOp.SUM, group)
        ctx.save_for_backward(logits_UV, total_U, entropy_U, which_N, target_N, own_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen_N - total_U[which_N], entropy_U[which_N]

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as above
        *grads: Tensor | None,
    ) -> tuple[Tensor, None, None, None, None]:
        logits_UV, total_U, entropy_U, which_N, target_N, own_N = ctx.saved_tensors
        grad_N, entropy_grad_N = grads
        if grad_N is None:
            grad_N = total_U.new_zeros(len(which_N))
        grad_U = torch.zeros_like(total_U).index_add_(0, which_N, grad_N)
        grad_UV = scale(logits_UV, ctx.temperature) - total_U[:, None]
        if entropy_grad_N is None:
            grad_UV.exp_().mul_(-grad_U[:, None])
        else:
            # d entropy / d logit = -p (log p + entropy)
            pull_U = torch.zeros_like(total_U).index_add_(0, which_N, entropy_grad_N)
            slope_UV = grad_UV.clamp_(min=NEVER) + entropy_U[:, None]
            slope_UV.mul_(pull_U[:, None]).add_(grad_U[:, None])
            grad_UV.exp_().mul_(slope_UV).neg_()
        places_N = which_N[own_N] * grad_UV.shape[1] + target_N[own_N]
        grad_UV.view(-1).index_add_(0, places_N, grad_N[own_N])
        if ctx.temperature != 1:
            grad_UV.div_(ctx.temperature)
        return grad_UV.to(logits_UV.dtype), None, None, None, None

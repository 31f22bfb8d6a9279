"""Log-probabilities of given tokens from logits.

Legend: U places with logits, V vocabulary, N tokens, each predicted by one of the places.
"""

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    logits_UV: Tensor, which_N: Tensor, target_N: Tensor, temperature: float
) -> Tensor:
    """``log softmax(logits / temperature)[which, target]``, [N]: natural logs.

    Computed in float32, or in float64 for float64 logits. Several tokens may share a place.
    Backward makes one buffer of the size of the logits, where autograd's own would make three.
    """
    return _TokenLogprobs.apply(logits_UV, which_N, target_N, temperature)  # pyright: ignore[reportReturnType]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch does not type what it saves on it
        logits_UV: Tensor,
        which_N: Tensor,
        target_N: Tensor,
        temperature: float,
    ) -> Tensor:
        scaled_UV = _scaled(logits_UV, temperature)
        total_U = torch.logsumexp(scaled_UV, dim=-1)
        ctx.save_for_backward(logits_UV, total_U, which_N, target_N)
        ctx.temperature = temperature
        return scaled_UV[which_N, target_N] - total_U[which_N]

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as above
        *grads: Tensor,
    ) -> tuple[Tensor, None, None, None]:
        logits_UV, total_U, which_N, target_N = ctx.saved_tensors
        (grad_N,) = grads
        grad_U = torch.zeros_like(total_U).index_add_(0, which_N, grad_N)
        grad_UV = _scaled(logits_UV, ctx.temperature) - total_U[:, None]
        grad_UV = grad_UV.exp_().mul_(-grad_U[:, None])
        places_N = which_N * grad_UV.shape[1] + target_N
        grad_UV.view(-1).index_add_(0, places_N, grad_N)
        if ctx.temperature != 1:
            grad_UV.div_(ctx.temperature)
        return grad_UV.to(logits_UV.dtype), None, None, None


def _scaled(logits_UV: Tensor, temperature: float) -> Tensor:
    wide_UV = logits_UV if logits_UV.dtype == torch.float64 else logits_UV.float()
    return wide_UV if temperature == 1 else wide_UV / temperature

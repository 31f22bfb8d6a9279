"""Log-probabilities of given tokens from logits.

Legend: U positions with logits, V vocabulary, N tokens, each predicted by one of the positions.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

_IN_A_CACHE: Final = 1 << 20
_ON_A_GPU: Final = 1 << 26
"""Number of logits that are processed at a time."""


def token_logprobs(
    logits_UV: Tensor, which_N: Tensor, target_N: Tensor, temperature: float
) -> Tensor:
    """Compute ``log softmax(logits / temperature)[which, target]`` in natural logs.

    Backward allocates one buffer of the size and dtype of the logits, where autograd would allocate
    several in float32. All other buffers of both passes are of a few rows at a time.

    Args:
        logits_UV: [U, V] floating.
        which_N: [N] int64: index of the position that predicts each token; positions may repeat.
        target_N: [N] int64: token ids.
        temperature: Temperature of the softmax.

    Returns:
        [N] float32, or float64 for float64 logits.
    """
    return _TokenLogprobs.apply(logits_UV, which_N, target_N, temperature)  # pyright: ignore[reportReturnType]


def largest_logprobs(
    logits_UV: Tensor, count: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """Return the ``count`` most probable tokens of each row of [U, V] logits, and their logprobs.

    Tokens are in falling order of their natural logprobs, which are returned in the same order.
    """
    wide_UV = logits_UV.to(torch.promote_types(logits_UV.dtype, torch.float32))
    kept = torch.log_softmax(wide_UV, -1).topk(min(count, logits_UV.shape[-1]), -1)
    tokens, logprobs = kept.indices.tolist(), kept.values.tolist()
    return tuple(map(tuple, tokens)), tuple(map(tuple, logprobs))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch does not type what it saves on it
        logits_UV: Tensor,
        which_N: Tensor,
        target_N: Tensor,
        temperature: float,
    ) -> Tensor:
        total_U = torch.cat(
            [
                torch.logsumexp(_scaled(logits_UV[rows], temperature), -1)
                for rows in _rows(logits_UV)
            ]
        )
        ctx.save_for_backward(logits_UV, total_U, which_N, target_N)
        ctx.temperature = temperature
        return _scaled(logits_UV[which_N, target_N], temperature) - total_U[which_N]

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as above
        *grads: Tensor,
    ) -> tuple[Tensor, None, None, None]:
        logits_UV, total_U, which_N, target_N = ctx.saved_tensors
        (grad_N,) = grads
        grad_U = torch.zeros_like(total_U).index_add_(0, which_N, grad_N)
        grad_UV = torch.empty_like(logits_UV)
        is_wide = grad_UV.dtype == total_U.dtype
        for rows in _rows(logits_UV):
            scaled_UV = _scaled(logits_UV[rows], ctx.temperature)
            part_UV = torch.sub(
                scaled_UV, total_U[rows, None], out=grad_UV[rows] if is_wide else None
            )
            part_UV.exp_().mul_(-grad_U[rows, None])
            place_N = (which_N - rows.start) * part_UV.shape[1] + target_N
            add_N = grad_N
            if len(part_UV) < len(logits_UV):
                # Tokens of other rows add zero: selecting them would need a synchronisation with the GPU.
                here_N = (which_N >= rows.start) & (which_N < rows.stop)
                place_N, add_N = torch.where(here_N, place_N, 0), torch.where(here_N, add_N, 0)
            part_UV.view(-1).index_add_(0, place_N, add_N)
            if ctx.temperature != 1:
                part_UV.div_(ctx.temperature)
            if not is_wide:
                grad_UV[rows] = part_UV
        return grad_UV, None, None, None


def _rows(logits_UV: Tensor) -> Iterator[slice]:
    places, vocabulary = logits_UV.shape
    at_once = _IN_A_CACHE if logits_UV.device.type == "cpu" else _ON_A_GPU
    size = max(1, at_once // vocabulary)
    return (slice(first, min(first + size, places)) for first in range(0, max(1, places), size))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1 else wide / temperature

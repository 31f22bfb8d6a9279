"""Log-probabilities of given tokens from logits, and entropies of what they were drawn from.

Where tensor-parallel ranks divide the rows of an output head, each has the logits of its own tokens
(``VocabularyShare``), and all of them call a function together: results are equal on all ranks, and
each gets the gradient of its logits.

Legend: U positions with logits, V vocabulary, or this rank's share of it, N tokens, each predicted by
one of the positions.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from offbeat.trainers.torch.vocabulary_rows import VocabularyShare, largest_of_all

_IN_A_CACHE: Final = 1 << 20
_ON_A_GPU: Final = 1 << 26
"""Number of logits that are processed at a time."""

NEVER: Final = -1e4
"""A logarithm whose ``exp`` is 0 in every dtype, in the place of minus infinity: times 0 it is 0."""


def token_logprobs(
    logits_UV: Tensor,
    which_N: Tensor,
    target_N: Tensor,
    temperature: float,
    share: VocabularyShare | None = None,
) -> Tensor:
    """Compute ``log softmax(logits / temperature)[which, target]`` in natural logs.

    Backward allocates one buffer of the size and dtype of the logits, where autograd would allocate
    several in float32. All other buffers of both passes are of a few rows at a time.

    Args:
        logits_UV: [U, V] floating.
        which_N: [N] int64: index of the position that predicts each token; positions may repeat.
        target_N: [N] int64: token ids.
        temperature: Temperature of the softmax.
        share: The tokens whose logits these are; None: all.

    Returns:
        [N] float32, or float64 for float64 logits.
    """
    return _TokenLogprobs.apply(logits_UV, which_N, target_N, temperature, False, share)[0]  # noqa: FBT003 -- apply takes no names  # pyright: ignore[reportIndexIssue, reportOptionalSubscript, reportReturnType]


def token_logprobs_and_entropies(
    logits_UV: Tensor,
    which_N: Tensor,
    target_N: Tensor,
    temperature: float,
    share: VocabularyShare | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``token_logprobs``, and the entropy of the distribution of each token.

    ``-sum p log p`` with ``p = softmax(logits / temperature)``, [N] in nats. It is read off the parts
    of the logits that the logprobs are computed from: no further buffer of their size, forward or
    backward. Both results have a gradient.
    """
    return _TokenLogprobs.apply(logits_UV, which_N, target_N, temperature, True, share)  # noqa: FBT003 -- as above  # pyright: ignore[reportReturnType]


def largest_logprobs(
    logits_UV: Tensor, count: int, share: VocabularyShare | None = None
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """Return the ``count`` most probable tokens of each row of [U, V] logits, and their logprobs.

    Tokens are in falling order of their natural logprobs, which are returned in the same order.
    """
    wide_UV = logits_UV.to(torch.promote_types(logits_UV.dtype, torch.float32))
    if share is None:
        kept = torch.log_softmax(wide_UV, -1).topk(min(count, logits_UV.shape[-1]), -1)
        tokens, logprobs = kept.indices.tolist(), kept.values.tolist()
    else:
        largest_UK, tokens_UK = largest_of_all(wide_UV, count, share)
        tokens, logprobs = tokens_UK.tolist(), largest_UK.tolist()
    return tuple(map(tuple, tokens)), tuple(map(tuple, logprobs))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch does not type what it saves on it
        logits_UV: Tensor,
        which_N: Tensor,
        target_N: Tensor,
        temperature: float,
        with_entropies: bool,  # noqa: FBT001 -- apply takes no names
        share: VocabularyShare | None,
    ) -> tuple[Tensor, Tensor | None]:
        parts_U = [
            _total_and_entropy(scale(logits_UV[rows], temperature), with_entropies=with_entropies)
            for rows in _rows(logits_UV)
        ]
        total_U = torch.cat([total_U for total_U, _ in parts_U])
        entropy_U = None
        if with_entropies:
            entropy_U = torch.cat([each_U for _, each_U in parts_U if each_U is not None])
        is_own_N = None
        if share is not None:
            total_U, entropy_U = share.of_all(total_U, entropy_U)
            is_own_N, target_N = share.own(target_N)
        ctx.save_for_backward(logits_UV, total_U, which_N, target_N, entropy_U, is_own_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        wanted_N = scale(logits_UV[which_N, target_N], temperature)
        if share is not None and is_own_N is not None:
            wanted_N = share.added_up(torch.where(is_own_N, wanted_N, 0))
        logprobs_N = wanted_N - total_U[which_N]
        return logprobs_N, None if entropy_U is None else entropy_U[which_N]

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as above
        *grads: Tensor | None,
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits_UV, total_U, which_N, target_N, entropy_U, is_own_N = ctx.saved_tensors
        grad_N, entropy_grad_N = grads
        if grad_N is None:
            grad_N = total_U.new_zeros(len(which_N))
        pull_U = None
        if entropy_grad_N is not None:
            pull_U = torch.zeros_like(total_U).index_add_(0, which_N, entropy_grad_N)
        grad_U = torch.zeros_like(total_U).index_add_(0, which_N, grad_N)
        if is_own_N is not None:  # the logits of others' tokens are elsewhere
            grad_N = torch.where(is_own_N, grad_N, 0)
        grad_UV = torch.empty_like(logits_UV)
        is_wide = grad_UV.dtype == total_U.dtype
        for rows in _rows(logits_UV):
            scaled_UV = scale(logits_UV[rows], ctx.temperature)
            part_UV = torch.sub(
                scaled_UV, total_U[rows, None], out=grad_UV[rows] if is_wide else None
            )
            if pull_U is None:
                part_UV.exp_().mul_(-grad_U[rows, None])
            else:
                # d entropy / d logit = -p (log p + entropy)
                slope_UV = part_UV.clamp_(min=NEVER) + entropy_U[rows, None]
                slope_UV.mul_(pull_U[rows, None]).add_(grad_U[rows, None])
                part_UV.exp_().mul_(slope_UV).neg_()
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
        return grad_UV, None, None, None, None, None


def _total_and_entropy(scaled_UV: Tensor, *, with_entropies: bool) -> tuple[Tensor, Tensor | None]:
    """Return logarithms [U] of the sums of the exponentials, and entropies [U] of their shares."""
    if not with_entropies:
        return torch.logsumexp(scaled_UV, -1), None
    largest_U = scaled_UV.amax(-1, keepdim=True)
    shifted_UV = (scaled_UV - largest_U).clamp_(min=NEVER)
    share_UV = shifted_UV.exp()
    sum_U = share_UV.sum(-1)
    mean_U = share_UV.mul_(shifted_UV).sum(-1) / sum_U
    return sum_U.log() + largest_U[:, 0], sum_U.log() - mean_U


def _rows(logits_UV: Tensor) -> Iterator[slice]:
    places, vocabulary = logits_UV.shape
    at_once = _IN_A_CACHE if logits_UV.device.type == "cpu" else _ON_A_GPU
    size = max(1, at_once // vocabulary)
    return (slice(first, min(first + size, places)) for first in range(0, max(1, places), size))


def scale(logits: Tensor, temperature: float) -> Tensor:
    """Return ``logits / temperature``, at least in float32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1 else wide / temperature

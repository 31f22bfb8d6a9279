"""Attention over rows of whole prompt groups, computed segment by segment without a mask.

A flat row holds the groups of a microbatch end to end, without padding: for each group the prompt,
then its branches (``PromptTree``). A prompt attends to itself causally. A branch attends to its
prompt and, causally, to itself. So memory is linear in the tokens of the row, and only attending
pairs of tokens are computed. The alternative would be a dense mask of tokens squared.

The megatron trainer uses the same functions for padded rows. Its context-parallel ranks have the
queries for a part of the row and the keys for all of it.

Legend: H query heads, T tokens of the row, O those tokens that have a query, D dimensions of a
head.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers declare some functions without types.

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from offbeat.trainers.batches.packing import AttentionPart, PromptTree, list_tree_parts

SPLIT: Final = "offbeat_split"
"""Name of the attention implementation in transformers. Without trees it is ``sdpa``."""

_REFUSED: Final = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments that models pass if they need other scores than plain softmax attention."""

_flash: Final[Callable[..., tuple[Tensor, Tensor]]] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 -- the public function hides the log-sums
)
_flash_backward: Final[Callable[..., tuple[Tensor, Tensor, Tensor]]] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 -- as above
)


def register_split_attention() -> None:
    """Register the implementation in transformers under the name ``SPLIT``. May be repeated."""
    AttentionInterface.register(SPLIT, _forward)
    AttentionMaskInterface.register(SPLIT, sdpa_mask)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    trees: Sequence[PromptTree] | None = None,
    **further: Any,  # noqa: ANN401 -- any arguments of a model's attention
) -> tuple[Tensor, None]:
    """Compute the attention [1, T, H, D] of a flat row. Without ``trees``, compute ``sdpa``."""
    if trees is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **further
        )
    unlike = [name for name in _REFUSED if further.get(name) is not None]
    if unlike or dropout or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"attention with {unlike or 'dropout, or not causal'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_1HTD = split_attention(query, key, value, list_tree_parts(trees), scale)
    return out_1HTD.transpose(1, 2).contiguous(), None


def split_attention(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[AttentionPart], scale: float
) -> Tensor:
    """Compute softmax attention [1, H, O, D] of a flat row.

    Args:
        query: [1, H, O, D].
        key: [1, heads, T, D]. The number of heads divides H.
        value: Like ``key``.
        parts: Parts of the row, in order. Every query is in exactly one of them.
        scale: Factor of the scores.
    """
    if query.device.type == "cpu":
        return _SplitOnCpu.apply(query, key, value, parts, scale)  # pyright: ignore[reportReturnType]
    return attention_by_part(query, key, value, parts, scale)


def attention_by_part(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[AttentionPart], scale: float
) -> Tensor:
    """Compute ``split_attention`` by torch's public function, with one call per prompt and branch.

    A branch reads a copy of its prompt's keys and values, so memory stays linear. On CUDA, the
    causal alignment is an argument of the fused kernels, so the mask needs no memory.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))

    def attend(part: AttentionPart) -> Tensor:
        q = query[:, :, part.queries]
        k, v = (torch.cat([each[:, :, keys] for keys in part.keys], 2) for each in (key, value))
        if q.shape[2] == k.shape[2]:
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        aligned = causal_lower_right(q.shape[2], k.shape[2])
        return scaled_dot_product_attention(q, k, v, attn_mask=aligned, scale=scale)

    return torch.cat([attend(part) for part in parts], 2)


class _SplitOnCpu(torch.autograd.Function):
    """``split_attention`` with the CPU's fused kernel, which also returns log-sums of its scores.

    One call computes the attention of all branches to their prompt. Log-sums are used to merge this
    with the branches' attention to themselves, as ring attention merges blocks of keys. With the
    log-sum over all keys, the kernel's backward yields each block's part of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch does not type what it saves on it
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: Sequence[AttentionPart],
        scale: float,
    ) -> Tensor:
        batch, heads, tokens, size = query.shape
        out = query.new_empty(batch, tokens, heads, size).transpose(1, 2)
        wide = torch.promote_types(query.dtype, torch.float32)
        # Logarithms of the sums of exponentials [1, H, O], in the kernel's layout
        sums = query.new_empty(batch, tokens, heads, dtype=wide).transpose(1, 2)
        blocks = list(_blocks(parts))
        for queries, keys, causal in blocks:
            part, part_sums = _flash(
                query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, causal, scale=scale
            )
            if causal:
                out[:, :, queries], sums[:, :, queries] = part, part_sums
                continue
            own, own_sums = out[:, :, queries], sums[:, :, queries]
            total = torch.logaddexp(own_sums, part_sums)
            own_share, share = (own_sums - total).exp_(), (part_sums - total).exp_()
            merged = own * own_share[..., None] + part * share[..., None]
            out[:, :, queries], sums[:, :, queries] = merged, total
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 -- as above
        *grads: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, sums = ctx.saved_tensors
        (grad_out,) = grads
        grad_query, grad_key, grad_value = map(torch.zeros_like, (query, key, value))
        for queries, keys, causal in ctx.blocks:
            q, k, v = _flash_backward(
                grad_out[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, queries],
                sums[:, :, queries],
                0.0,
                causal,
                scale=ctx.scale,
            )
            grad_query[:, :, queries] += q
            grad_key[:, :, keys] += k
            grad_value[:, :, keys] += v
        return grad_query, grad_key, grad_value, None, None


def _blocks(parts: Sequence[AttentionPart]) -> Iterator[tuple[slice, slice, bool]]:
    """Yield queries, keys, and whether they are one causal sequence.

    For each query, the causal block comes first. Adjacent parts that attend to the same keys,
    without a causal limit, share one block of these keys.
    """
    whole = dict[tuple[int, int], list[slice]]()  # queries by the keys that all of them attend to
    for part in parts:
        queries, (*before, last) = part.queries, part.keys
        own = slice(last.stop - (queries.stop - queries.start), last.stop)
        yield queries, own, True
        if last.start < own.start:
            before.append(slice(last.start, own.start))
        for keys in before:
            found = whole.setdefault((keys.start, keys.stop), [])
            if found and found[-1].stop == queries.start:
                found[-1] = slice(found[-1].start, queries.stop)
            else:
                found.append(queries)
    for (start, stop), every in whole.items():
        for queries in every:
            yield queries, slice(start, stop), False

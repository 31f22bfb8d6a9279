"""Context parallelism: attention and sums over ranks that share each row of tokens.

Every rank computes its own tokens (``token_share``) and attends from them to the keys and values of
all, which are gathered in every layer. What the loss reads is made whole again on every rank
(``summed``), so that a loss over whole sequences does not depend on how rows were cut.

Legend: O tokens of this rank in a row, T tokens of a row, B rows, H heads, D dimension of a head.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# megatron-core has no types.

import copy
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.distributed import ProcessGroup

from offbeat.plugins.megatron.groups import context_group
from offbeat.trainers.torch.vocabulary_rows import AddedUp, sum_over


def summed(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks of values that each computes in part, and reads whole.

    Every rank goes on to compute the same from the sum, so the gradient of its own part is the
    gradient of the sum: it is not added up again.
    """
    return AddedUp.apply(values, partial(sum_over, group=group))  # pyright: ignore[reportReturnType]


class GatherTokens(torch.autograd.Function):
    """Gathers the tokens [O, ...] of all ranks; in backward every rank gets the sum for its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401 -- torch does not type it
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 -- as above
        # gloo has no reduce-scatter; keys and values of grouped heads are small.
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class ContextAttention(DotProductAttention):
    """Attention from this rank's tokens to those of all context-parallel ranks.

    The library's own refuses context parallelism, so it is built as for one rank; it computes whatever
    queries, keys and mask it is given.
    """

    gather: ClassVar[type[GatherTokens]] = GatherTokens

    def __init__(self, config: TransformerConfig, *args: Any, **keywords: Any) -> None:  # noqa: ANN401 -- the library's
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **keywords)

    def forward(
        self,
        query: Tensor,  # [O, B, H, D]
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend under a mask [R, 1, O, T] whose columns are in the order of the gathered tokens."""
        del attn_mask_type, attention_bias, packed_seq_params
        group = context_group()
        keys, values = self.gather.apply(key, group), self.gather.apply(value, group)
        return super().forward(query, keys, values, attention_mask)

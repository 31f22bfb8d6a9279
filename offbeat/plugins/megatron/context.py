"""Context parallelism: attention and sums over ranks that share each row of tokens.

Every rank computes its own tokens (``token_share``). They attend to the keys and values of all
tokens, which are gathered in every layer and put into the order of the row. Values that the loss
reads are summed over the ranks (``sum_over_ranks``). So a loss over whole sequences does not depend on how
rows were cut.

Legend: O tokens of this rank in a row, T tokens of a row, B rows, H heads, D dimension of a head.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# megatron-core has no types.

from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from offbeat.plugins.megatron.attention import SegmentAttention, attend_by_parts, list_row_parts
from offbeat.plugins.megatron.groups import context_group
from offbeat.plugins.megatron.token_share import list_column_ranges, order_parts
from offbeat.trainers.torch.logprobs import AddedUp, sum_over


def sum_over_ranks(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks of partial values. Every rank then reads the whole sum.

    Every rank computes the same result from the sum. So the gradient of its own part is the gradient of
    the sum, and is not summed again.
    """
    return AddedUp.apply(values, partial(sum_over, group=group))  # pyright: ignore[reportReturnType]


class GatherTokens(torch.autograd.Function):
    """Gathers all ranks' tokens [O, ...]. In backward, each rank gets its tokens' summed gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401 -- torch does not type it
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 -- as above
        # gloo has no reduce-scatter, but keys and values of grouped heads are small.
        whole = grads[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class ContextAttention(SegmentAttention):
    """Attention from this rank's tokens to the tokens of all context-parallel ranks."""

    gather: ClassVar[type[GatherTokens]] = GatherTokens

    def forward(
        self,
        query: Tensor,  # [O, B, H, D]
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **_: Any,  # noqa: ANN401 -- the library's
    ) -> Tensor:
        """Attend within the segments [B, T] int64 of whole rows, on the CPU. None is refused."""
        assert attention_mask is not None  # noqa: S101 -- whole rows are one segment
        group = context_group()
        ranks, tokens = dist.get_world_size(group), attention_mask.shape[1]
        own = list_column_ranges(tokens, dist.get_rank(group), ranks)
        return attend_by_parts(
            query,
            self._gather(key, group),
            self._gather(value, group),
            list_row_parts(attention_mask.numpy(), own),
            self.scale,
        )

    def _gather(self, own: Tensor, group: ProcessGroup) -> Tensor:
        """Return the tokens [T, B, ...] of all ranks in the order of the row."""
        order = order_parts(dist.get_world_size(group))
        pieces = self.gather.apply(own, group).chunk(len(order))
        return torch.cat([pieces[each] for each in order])

"""Alignment of a rank's microbatches with those of the ranks that it computes with."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# megatron-core has no types.

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch.distributed import ProcessGroup

from offbeat.plugins.megatron.groups import expert_group, layout_group
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.token_share import PARTS_PER_RANK
from offbeat.trainers.batches.packing import PADDING, Ints, PackedRows, rows_of


def aligned(
    microbatches: Sequence[PackedRows], config: TransformerConfig, layout: ParallelLayout
) -> list[PackedRows]:
    """Return the microbatches padded, with empty ones appended, so that no rank waits for another.

    Ranks that share experts exchange the tokens of every microbatch. They need equal numbers of
    microbatches, and equal shapes if they gather the tokens of all; they call this together. Ranks
    that share only gradients need neither. Ranks that share each row need its length to be a
    multiple.
    """
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if layout.grid.context > 1:
        multiple *= PARTS_PER_RANK * layout.grid.context
    has_experts = config.num_moe_experts is not None
    gathers = has_experts and config.moe_token_dispatcher_type == "allgather"  # noqa: S105 -- no secret
    shapes: list[tuple[int, int]] = [each.input_ids_RT.shape for each in microbatches]
    count, rows, tokens = len(shapes), 1, 1
    token = max((each.padding_token for each in microbatches), default=0)
    if has_experts:
        every_rows, every_tokens = zip(*shapes or [(1, 1)], strict=True)
        # Replicas that are linked through others wait for those as well: all ranks of the layout.
        group = expert_group() if layout.experts_fill_replicas else layout_group()
        count, rows, tokens, token = _most(
            [count, max(every_rows), max(every_tokens), token], group
        )
    even: list[PackedRows] = []
    for each in [*microbatches, *[_empty(token)] * (count - len(shapes))]:
        own_rows, own_tokens = each.input_ids_RT.shape
        shape = (rows, tokens) if gathers else (own_rows, own_tokens)
        even.append(_padded(each, *shape, multiple))
    return even


def _most(values: Sequence[int], group: ProcessGroup) -> list[int]:
    """Return the elementwise maximum over the ranks of a group."""
    most = torch.tensor(values).to(torch.cuda.current_device())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return most.tolist()


def _padded(packed: PackedRows, rows: int, tokens: int, multiple: int) -> PackedRows:
    """Pad to ``rows`` rows of ``tokens`` tokens, rounded up to ``multiple``; padding is not read."""
    tokens = -(-tokens // multiple) * multiple
    if packed.input_ids_RT.shape == (rows, tokens):
        return packed
    width = packed.input_ids_RT.shape[1]
    row_U, column_U = np.divmod(packed.predicts_U, width)

    def grown(values: Ints, fill: int) -> Ints:
        more = rows - values.shape[0], tokens - values.shape[1]
        return np.pad(values, ((0, more[0]), (0, more[1])), constant_values=fill)

    media = packed.media
    if media is not None:
        row_K, column_K = np.divmod(media.places_K, width)
        axes = media.axes_3RT
        more = (0, 0), (0, rows - packed.input_ids_RT.shape[0]), (0, tokens - width)
        media = replace(
            media,
            places_K=row_K * tokens + column_K,
            axes_3RT=None if axes is None else np.pad(axes, more),
        )
    return replace(
        packed,
        media=media,
        input_ids_RT=grown(packed.input_ids_RT, packed.padding_token),
        positions_RT=grown(packed.positions_RT, 0),
        segments_RT=grown(packed.segments_RT, PADDING),
        sample_tokens_RT=grown(packed.sample_tokens_RT, 0),
        predicts_U=row_U * tokens + column_U,
    )


def _empty(token: int) -> PackedRows:
    """Return a microbatch of one token, of which no prediction is wanted."""
    return replace(rows_of([[token]]), predicts_U=np.zeros(0, np.int64), is_padding=True)

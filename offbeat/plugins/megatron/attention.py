"""Attention of the decoder by torch's fused kernels, without a tensor of tokens squared.

The library's own attention writes scores of all pairs of tokens to memory. Here the torch trainer's
functions compute padded rows, with several samples after one prompt, segment by segment.

The library passes a mask from the model to every layer, through its recomputation. Here each layer
gets the segments of the tokens instead of a mask, and derives the parts from them.

Legend: R rows, T tokens of a row, O tokens of this rank in a row, H query heads, D dimensions of a
head, F tokens O of all rows.

Also splits padded rows into parts for attention without a mask, by their tokens' segments. Pure.

A row holds a prompt, branches behind it, and padding (``PackedRows.segments_RT``). Rows are counted
end to end: token t of row r is key ``r * T + t``. A rank's queries are some columns of each row.

Legend: R rows, T tokens of a row.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# megatron-core has no types.

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from offbeat.trainers.batches.packing import PROMPT, AttentionPart, Ints
from offbeat.trainers.torch.split_attention import split_attention


def list_row_parts(segments_RT: Ints, columns: Sequence[slice]) -> list[AttentionPart]:
    """Return parts in which each token attends to the tokens that ``packing.visible`` shows it.

    Args:
        segments_RT: Segments of whole rows. Each segment's tokens are next to each other, and a
            prompt is at the start of its row.
        columns: Columns that have queries, in the order of the queries.
    """
    rows, tokens = segments_RT.shape
    own = sum(each.stop - each.start for each in columns)
    return [
        AttentionPart(
            _shift(part.queries, row * own), tuple(_shift(keys, row * tokens) for keys in part.keys)
        )
        for row in range(rows)
        for part in _parts_of_row(segments_RT[row], columns)
    ]


def _parts_of_row(segments_T: Ints, columns: Sequence[slice]) -> Iterator[AttentionPart]:
    """Yield the parts of one row. Keys are its columns, and queries are counted from 0."""
    bounds = [0, *(np.flatnonzero(np.diff(segments_T)) + 1).tolist(), len(segments_T)]
    runs = [slice(*each) for each in pairwise(bounds)]
    prompt = runs[0] if segments_T[0] == PROMPT else slice(0, 0)
    base = 0
    for own in columns:
        for run in runs:
            first, stop = max(run.start, own.start), min(run.stop, own.stop)
            if first >= stop:
                continue
            queries = slice(base + first - own.start, base + stop - own.start)
            if prompt.stop in {0, run.start, run.stop}:
                # Without a prompt a run begins at its first token, else at the prompt's.
                yield AttentionPart(queries, (slice(run.start if not prompt.stop else 0, stop),))
            else:
                yield AttentionPart(queries, (prompt, slice(run.start, stop)))
        base += own.stop - own.start


def _shift(tokens: slice, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)


class SegmentAttention(MegatronModule):
    """Causal softmax attention [O, R, H D] of a layer, which replaces ``DotProductAttention``."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: object,
        softmax_scale: float | None = None,
        **__: object,
    ) -> None:
        """Check that the library's options ask for plain attention.

        Raises:
            NotImplementedError: They ask for a window, a sink, dropout or scaling by layer.
        """
        super().__init__(config=config)
        del layer_number
        unlike = {
            "window_size": config.window_size is not None,
            "softmax_type": config.softmax_type != "vanilla",
            "attention_dropout": config.attention_dropout != 0,
            "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
        }
        if any(unlike.values()):
            names = ", ".join(name for name, found in unlike.items() if found)
            raise NotImplementedError(f"attention with {names}")
        assert config.kv_channels is not None  # noqa: S101 -- set by the library
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,  # [T, R, H, D]
        key: Tensor,  # [T, R, heads, D]
        value: Tensor,
        attention_mask: Tensor | None,
        **_: Any,  # noqa: ANN401 -- the library's
    ) -> Tensor:
        """Attend within the segments [R, T] int64 on the CPU that are given as the mask.

        If the mask is None, every token attends to all tokens before it in its row.
        """
        if attention_mask is None:
            return attend_causally(query, key, value, self.scale)
        columns = [slice(0, query.shape[0])]
        parts = list_row_parts(attention_mask.numpy(), columns)
        return attend_by_parts(query, key, value, parts, self.scale)


def attend_causally(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return causal attention [T, R, H D] of all rows at once."""
    tokens, rows, heads, size = query.shape
    # Torch's float32 kernels on CUDA cannot read grouped keys, so torch would compute scores.
    reads_groups = query.device.type == "cpu" or query.element_size() == torch.half.itemsize
    if not reads_groups:
        shared = heads // key.shape[2]
        key, value = (each.repeat_interleave(shared, dim=2) for each in (key, value))
    q_RHTD, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    out_RHTD = scaled_dot_product_attention(
        q_RHTD,
        k,
        v,
        is_causal=True,
        scale=scale,
        enable_gqa=reads_groups and heads != key.shape[2],
    )
    return out_RHTD.permute(2, 0, 1, 3).reshape(tokens, rows, heads * size)


def attend_by_parts(
    query: Tensor, key: Tensor, value: Tensor, parts: Sequence[AttentionPart], scale: float
) -> Tensor:
    """Return attention [O, R, H D], computed by parts of the rows laid end to end."""
    tokens, rows, heads, size = query.shape

    def lay_flat(each: Tensor) -> Tensor:
        return each.transpose(0, 1).reshape(1, -1, *each.shape[2:]).transpose(1, 2)

    out_1HFD = split_attention(lay_flat(query), lay_flat(key), lay_flat(value), parts, scale)
    out_ROHD = out_1HFD.transpose(1, 2).reshape(rows, tokens, heads * size)
    return out_ROHD.transpose(0, 1).contiguous()

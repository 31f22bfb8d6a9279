"""One rank's rows of a chunk, cut into microbatches that all ranks can run together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from offbeat.actors.trainers.batches.packing import PADDING, Batch, Ints, Packed, pack
from offbeat.actors.trainers.batches.rows import (
    best_response_tokens,
    plan_microbatches,
    plan_rows,
)
from offbeat.actors.trainers.megatron.groups import expert_group


@dataclass(frozen=True, slots=True)
class Cutting:
    """How rows are laid out."""

    max_tokens: int  # of a microbatch, padding included
    shared_prompt: bool
    ratio_tokens: float  # cost of a token outside attention, over that of a pair of tokens inside

    def cut(self, batch: Batch | None) -> list[Packed]:
        """The microbatches of a batch; none of none."""
        if batch is None:
            return []
        response_tokens = 0.0
        if self.shared_prompt:
            prompt_tokens = sum(map(len, batch.prompts)) / len(batch.prompts)
            response_tokens = best_response_tokens(prompt_tokens, self.ratio_tokens)
        rows = plan_rows(batch, response_tokens=response_tokens, max_tokens=self.max_tokens)
        return [pack(batch, each) for each in plan_microbatches(rows, self.max_tokens)]


def aligned(
    microbatches: Sequence[Packed], *, with_experts: bool, at_least: int = 0
) -> list[Packed]:
    """The same microbatches, and empty ones behind them, so that no rank waits for another.

    Ranks that share experts exchange the tokens of every microbatch: they need as many of them, and
    of the same shape, as the others. All of them call this together. Ranks that only share gradients
    need neither.
    """
    if not with_experts:
        return [*microbatches, *[_EMPTY] * (at_least - len(microbatches))]
    shapes = [each.input_ids_RT.shape for each in microbatches] or [(1, 1)]
    rows, tokens = (max(each) for each in zip(*shapes, strict=True))
    wanted = torch.tensor([max(at_least, len(microbatches)), rows, tokens])
    wanted = wanted.to(torch.cuda.current_device())
    dist.all_reduce(wanted, dist.ReduceOp.MAX, group=expert_group())
    count, rows, tokens = wanted.tolist()
    padded = [_padded(each, rows, tokens) for each in microbatches]
    return padded + [_padded(_EMPTY, rows, tokens)] * (count - len(padded))


def _padded(packed: Packed, rows: int, tokens: int) -> Packed:
    """The same with more rows and longer ones; nothing is read from what is added."""
    width = packed.input_ids_RT.shape[1]
    row_U, column_U = np.divmod(packed.predicts_U, width)

    def grown(values: Ints, fill: int) -> Ints:
        more = rows - values.shape[0], tokens - values.shape[1]
        return np.pad(values, ((0, more[0]), (0, more[1])), constant_values=fill)

    return replace(
        packed,
        input_ids_RT=grown(packed.input_ids_RT, 0),
        positions_RT=grown(packed.positions_RT, 0),
        segments_RT=grown(packed.segments_RT, PADDING),
        predicts_U=row_U * tokens + column_U,
    )


_NONE = np.zeros(0, np.int64)
_EMPTY = Packed(
    input_ids_RT=np.zeros((1, 1), np.int64),
    positions_RT=np.zeros((1, 1), np.int64),
    segments_RT=np.zeros((1, 1), np.int64),
    predicts_U=_NONE,
    which_N=_NONE,
    target_N=_NONE,
    source_N=_NONE,
    one_sample_a_row=True,
)

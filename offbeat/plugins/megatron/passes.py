"""Passes of a megatron rank: microbatches through the library's schedules, forward and backward.

Also aligns a rank's microbatches with those of its peers.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# megatron-core has no types.

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from offbeat.config.loss_spec import LossSpec
from offbeat.plugins.megatron.forward import Forward
from offbeat.plugins.megatron.gradients import Gradients
from offbeat.plugins.megatron.groups import expert_group, layout_group, pipeline_group
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.router import ExpertRouter
from offbeat.plugins.megatron.token_share import PARTS_PER_RANK
from offbeat.trainers.backend import LogprobRequest, TopLogprobs
from offbeat.trainers.batches.packing import (
    PADDING,
    Batch,
    Ints,
    PackedRows,
    canary_rows,
    pack_rows,
)
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.flops import ModelFlops, count_work
from offbeat.trainers.parts import LossOf, Passes, RankFacts
from offbeat.trainers.ranks.peers import Peers, WorldBroken, run_on_all_ranks, shorten_error
from offbeat.transfer_queue.schema import POLICY_LOGPROBS, Columns


def align_microbatches(
    microbatches: Sequence[PackedRows], config: TransformerConfig, layout: ParallelLayout
) -> list[PackedRows]:
    """Return the microbatches padded, with empty ones appended, so that no rank waits for another.

    Ranks that share experts exchange the tokens of every microbatch. So they need equal numbers of
    microbatches, and equal shapes if they gather the tokens of all. All of them must call this
    together. Ranks that share only gradients need neither. If ranks share each row, its length must
    be a multiple of the number of its parts.
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
        # Linked replicas wait for each other indirectly, so all ranks of the layout align.
        group = expert_group() if layout.experts_fill_replicas else layout_group()
        count, rows, tokens, token = _most(
            [count, max(every_rows), max(every_tokens), token], group
        )
    even: list[PackedRows] = []
    for each in [*microbatches, *[_empty(token)] * (count - len(shapes))]:
        own_rows, own_tokens = each.input_ids_RT.shape
        shape = (rows, tokens) if gathers else (own_rows, own_tokens)
        even.append(_pad(each, *shape, multiple))
    return even


def _most(values: Sequence[int], group: ProcessGroup) -> list[int]:
    """Return the elementwise maximum over the ranks of a group."""
    most = torch.tensor(values).to(torch.cuda.current_device())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return most.tolist()


def _pad(packed: PackedRows, rows: int, tokens: int, multiple: int) -> PackedRows:
    """Pad to ``rows`` x ``tokens``, rounded up to ``multiple``. The padding is never read."""
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
    """Return a microbatch of one token without a wanted prediction."""
    return replace(pack_rows([[token]]), predicts_U=np.zeros(0, np.int64), is_padding=True)


T = TypeVar("T")
_KEPT: Final = msgspec.msgpack.Decoder(TopLogprobs | None)


def share_top_logprobs(kept: TopLogprobs | None, peers: Peers) -> TopLogprobs:
    """Return the last stage's result on all ranks. ``kept`` is None on ranks of other stages."""
    # The first rank need not be on the last stage.
    gathered = peers.all_gather(kept, _KEPT)
    return next(each for each in gathered if each is not None)


@dataclass(eq=False)
class MegatronPasses(Passes[PackedRows]):
    """Passes of one rank's share of a model. Results are equal on all ranks of a replica."""

    facts: RankFacts
    peers: Peers
    planner: MicrobatchPlanner
    flops: ModelFlops | None  # None: not known
    forward: Forward  # of the share that is trained
    gradients: Gradients  # buffers to which passes add
    routers: Sequence[tuple[int, ExpertRouter]]  # with their index among all layers of experts
    load_reference: Callable[[], Forward]  # all ranks must call it together

    def cut(
        self, groups: Sequence[Columns], *, only_trained: bool
    ) -> tuple[Batch | None, list[PackedRows]]:
        return self.planner.cut(groups, only_trained=only_trained)

    def agree(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        what, own = run_on_all_ranks(self.peers, during, read)
        return what, align_microbatches(own, self.forward.config, self.forward.layout)

    def count_work(self, microbatches: Sequence[PackedRows]) -> tuple[int, float]:
        return count_work(microbatches, self.flops)

    def load(self, column: str, teacher: str | None) -> Forward:
        del teacher
        return self.forward if column == POLICY_LOGPROBS else self._reference

    @cached_property
    def _reference(self) -> Forward:
        return self.load_reference()

    def logprobs(
        self, column: str, count: int, microbatches: Sequence[PackedRows], request: LogprobRequest
    ) -> NDArray[np.float32]:
        forward, device = self.load(column, None), self.facts.device
        values = torch.zeros(count, dtype=torch.float32, device=device)

        def keep(packed: PackedRows, logprobs_N: Tensor, _: Tensor) -> Tensor:
            source_N = torch.from_numpy(packed.source_N).to(device)
            values[source_N] = logprobs_N.float()
            return logprobs_N.sum()

        with self._no_message_unread():
            forward.run(microbatches, keep, request["temperature"])
        if self.forward.layout.grid.pipeline > 1:
            last = dist.get_process_group_ranks(pipeline_group())[-1]
            dist.broadcast(values, src=last, group=pipeline_group())
        return values.cpu().numpy()

    @torch.no_grad()
    def top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        canaries = canary_rows(prompts, self.facts.media_rules)
        (rows,) = align_microbatches([canaries], self.forward.config, self.forward.layout)
        with self._no_message_unread():
            kept = self.forward.top_logprobs(rows, count)
        return share_top_logprobs(kept, self.peers)

    def add_gradients(
        self, microbatches: Sequence[PackedRows], loss_of: LossOf, loss: LossSpec
    ) -> None:
        temperature, normalize = loss.temperature, loss.config.normalize
        with self._no_message_unread():
            self.gradients.accumulate(
                lambda: self.forward.run(microbatches, loss_of, temperature, trains=normalize)
            )

    def router_biases(self) -> list[tuple[int, Tensor]]:
        biases = ((index, router.expert_bias) for index, router in self.routers)
        return [(index, bias) for index, bias in biases if bias is not None]

    @contextmanager
    def _no_message_unread(self) -> Generator[None]:
        """Declare the world broken if a pipeline stage fails, because unread messages would remain.

        Raises:
            WorldBroken: An error was raised in the block, with several pipeline stages.
        """
        try:
            yield
        except Exception as error:
            if self.forward.layout.grid.pipeline == 1:
                raise
            detail = f"{type(error).__name__}: {shorten_error(error)}"
            raise WorldBroken(self.peers.rank, "the pipeline", detail) from error

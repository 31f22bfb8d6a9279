"""Passes of a megatron rank: microbatches through the library's schedules, forward and backward."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# megatron-core has no types.

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from offbeat.config.loss_spec import LossSpec
from offbeat.plugins.megatron.forward import Forward
from offbeat.plugins.megatron.gradients import Gradients
from offbeat.plugins.megatron.groups import pipeline_group
from offbeat.plugins.megatron.microbatches import aligned
from offbeat.plugins.megatron.router import ExpertRouter
from offbeat.trainers.backend import LogprobRequest, TopLogprobs
from offbeat.trainers.batches.packing import Batch, PackedRows, canary_rows
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.flops import ModelFlops, count_work
from offbeat.trainers.parts import LossOf, Passes, RankFacts
from offbeat.trainers.ranks.peers import Peers, WorldBroken, line_of, run_on_all_ranks
from offbeat.transfer_queue.schema import POLICY_LOGPROBS, Columns

T = TypeVar("T")
_KEPT: Final = msgspec.msgpack.Decoder(TopLogprobs | None)


def share_top_logprobs(kept: TopLogprobs | None, peers: Peers) -> TopLogprobs:
    """Return on all ranks what ranks of the last stage computed; ``kept`` is None on the others."""
    # The first rank need not be on the last stage.
    gathered = peers.all_gather(kept, _KEPT)
    return next(each for each in gathered if each is not None)


@dataclass(eq=False)
class MegatronPasses(Passes[PackedRows]):
    """Passes of one rank's share of a model; results are equal on all ranks of a replica."""

    facts: RankFacts
    peers: Peers
    planner: MicrobatchPlanner
    flops: ModelFlops | None  # None: not known
    forward: Forward  # of the share that is trained
    gradients: Gradients  # buffers to which passes add
    routers: Sequence[tuple[int, ExpertRouter]]  # with their index among all layers of experts
    load_reference: Callable[[], Forward]  # all ranks call it together

    def cut(
        self, groups: Sequence[Columns], *, only_trained: bool
    ) -> tuple[Batch | None, list[PackedRows]]:
        return self.planner.cut(groups, only_trained=only_trained)

    def agree(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        what, own = run_on_all_ranks(self.peers, during, read)
        return what, aligned(own, self.forward.config, self.forward.layout)

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
        (rows,) = aligned([canaries], self.forward.config, self.forward.layout)
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
        """Declare the world broken if a pipeline stage fails: unread messages would be read later.

        Raises:
            WorldBroken: An error was raised in the block, with several pipeline stages.
        """
        try:
            yield
        except Exception as error:
            if self.forward.layout.grid.pipeline == 1:
                raise
            detail = f"{type(error).__name__}: {line_of(error)}"
            raise WorldBroken(self.peers.rank, "the pipeline", detail) from error

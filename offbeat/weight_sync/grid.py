"""Parallel sizes of one side of a sync, and the ranks at each coordinate. Pure.

Ranks are numbered as in megatron-core: the tensor-parallel coordinate varies fastest, then context,
data and pipeline. The experts have a second numbering of the same ranks within a pipeline stage:
expert-tensor varies fastest, then expert, then the copies. With ``expert_tensor`` 1 a rank belongs
to both a tensor-parallel group and an expert group, so neither numbering is a product of the other.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

from offbeat.weight_sync.errors import LayoutRefused
from offbeat.weight_sync.region import Ranks

MOST_RANKS: Final = 1 << 20
"""Maximum ranks of one side. A larger number is a typing error and would exhaust the memory."""


@dataclass(frozen=True, slots=True)
class ModelGrid:
    """Grid of ranks that share one or several copies of a model.

    Raises:
        LayoutRefused: The experts' sizes do not divide the ranks of a stage.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1  # copies
    expert: int = 1
    expert_tensor: int | None = None  # None: same as ``tensor``
    shards: int = 1  # FSDP ranks; torch.chunk cuts each tensor along its first axis
    vocabulary_multiple: int = 1  # embedding rows are padded to a multiple of this times tensor
    stages: tuple[int, ...] = ()  # layers of each pipeline stage; empty: equal numbers
    own_plan: int = 0  # 1: tensor ranks use the model's tensor-parallel plan, as in torch trainers
    encoders: int = 0  # last ranks; they share the vision tower, cut like ``shards``
    encoder_tensor: int = 1  # tensor-parallel ranks of each encoder, which divide its matrices

    def __post_init__(self) -> None:
        self._check_own_plan()
        if self.ranks > MOST_RANKS:
            raise LayoutRefused("their product", f"{self.ranks} ranks", f"at most {MOST_RANKS}")
        # Only the torch trainer shards divided matrices. It divides by the model's own plan.
        beside = self.model_ranks * self.expert
        if self.own_plan:
            beside //= self.tensor
            if beside > 1:
                got = "1 together with pipeline, context or expert parallelism"
                raise LayoutRefused("own_plan", got, "only tensor and shards next to it")
        if self.shards > 1 and beside > 1:
            got = f"{self.shards} together with tensor, pipeline, context or expert parallelism"
            want = "1, or the only kind of parallelism but tensor with own_plan=1"
            raise LayoutRefused("fsdp", got, want)
        if self.encoders:
            self._check_encoders()
        elif self.encoder_tensor > 1:
            got = f"{self.encoder_tensor} without encoders"
            raise LayoutRefused("encoder_tensor", got, "encoders beside it")
        expert_ranks = self.expert * self.expert_tensor_ranks
        if self.stage_ranks % expert_ranks:
            data = expert_ranks // math.gcd(expert_ranks, self.tensor * self.context)
            raise LayoutRefused(
                "expert x expert_tensor",
                f"{self.expert} x {self.expert_tensor_ranks}",
                f"a divisor of tensor x context x data = {self.stage_ranks}, as with data={data}",
            )
        if self.stages and len(self.stages) != self.pipeline:
            want = f"{self.pipeline} numbers, one for each pipeline stage"
            raise LayoutRefused("stages", str(list(self.stages)), want)

    def _check_own_plan(self) -> None:
        if self.own_plan not in (0, 1):
            raise LayoutRefused("own_plan", str(self.own_plan), "0 or 1")
        if self.own_plan and self.vocabulary_multiple > 1:
            want = "1 together with own_plan: the torch trainer pads no rows"
            raise LayoutRefused("vocabulary_multiple", str(self.vocabulary_multiple), want)

    def _check_encoders(self) -> None:
        if self.data > 1 and (self.shards > 1 or self.own_plan):
            got = f"{self.encoders} together with copies of shards"
            raise LayoutRefused("encoders", got, "0: no trainer has both")
        of, lanes = ("shards", self.shards) if self.shards > 1 else ("data", self.data)
        if lanes % self.encoders:
            want = f"a divisor of {of} = {lanes}: each serves as many of them"
            raise LayoutRefused("encoders", str(self.encoders), want)

    @property
    def expert_tensor_ranks(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def model_ranks(self) -> int:
        """Number of ranks of one copy, not counting shards."""
        return self.tensor * self.context * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def ranks_without_encoders(self) -> int:
        """Number of ranks that hold the language model: all except encoder ranks."""
        return self.stage_ranks * self.pipeline * self.shards

    @property
    def ranks(self) -> int:
        return self.ranks_without_encoders + self.encoder_ranks

    @property
    def encoder_ranks(self) -> int:
        """Ranks that hold only the vision tower."""
        return self.encoders * self.encoder_tensor

    def dense(self, tensor_rank: int, stage: int) -> Ranks:
        """Return the ranks that hold the same part of a stage's dense weights."""
        first = stage * self.stage_ranks + tensor_rank
        return tuple(range(first, (stage + 1) * self.stage_ranks, self.tensor))

    def of_expert(self, expert_rank: int, tensor_rank: int, stage: int) -> Ranks:
        """Return the ranks that hold the same part of the same experts of a stage."""
        block = self.expert_tensor_ranks * self.expert
        first = stage * self.stage_ranks + expert_rank * self.expert_tensor_ranks + tensor_rank
        return tuple(range(first, (stage + 1) * self.stage_ranks, block))

    def shard(self, part: int, tensor_rank: int = 0) -> Ranks:
        """Return the ranks that hold the same shard of a tensor rank's part, one per copy."""
        first, step = part * self.tensor + tensor_rank, self.shards * self.tensor
        return tuple(range(first, self.ranks_without_encoders, step))

    def encoder(self, part: int, tensor_rank: int = 0) -> Ranks:
        """Return the encoder rank that holds a part of a tensor rank's share of the vision tower."""
        return (self.ranks_without_encoders + part * self.encoder_tensor + tensor_rank,)

    def find_stage(self, layer: int, layers: int) -> int:
        """Return the pipeline stage of a layer.

        Raises:
            LayoutRefused: The stages do not add up to the model's layers.
        """
        return _find_stage(layer, self._layer_counts(layers))

    def list_layers(self, stage: int, layers: int) -> range:
        """Return the layers of a pipeline stage.

        Raises:
            LayoutRefused: The stages do not add up to the model's layers.
        """
        counts = self._layer_counts(layers)
        first = sum(counts[:stage])
        return range(first, first + counts[stage])

    def _layer_counts(self, layers: int) -> tuple[int, ...]:
        counts = self.stages or _equal_stages(layers, self.pipeline)
        if sum(counts) != layers:
            want = f"a total of {layers} layers"
            raise LayoutRefused("stages", f"{' + '.join(map(str, counts))}", want)
        return counts


@cache
def _equal_stages(layers: int, stages: int) -> tuple[int, ...]:
    if layers % stages:
        want = f"a divisor of {layers} layers, or stages=N,N,... that add up to them"
        raise LayoutRefused("pipeline", str(stages), want)
    return (layers // stages,) * stages


@cache
def _find_stage(layer: int, counts: tuple[int, ...]) -> int:
    for stage, count in enumerate(counts):
        if layer < count:
            return stage
        layer -= count
    return len(counts) - 1

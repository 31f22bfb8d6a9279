"""Passes of a torch rank: microbatches through a Hugging Face model, forward and backward."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.models.media_passes import FeaturesOf
from offbeat.models.media_rules import media_rules
from offbeat.trainers.backend import LogprobRequest, TopLogprobs
from offbeat.trainers.batches.packing import Batch, PackedRows, padding_microbatch
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.flops import ModelFlops, count_work
from offbeat.trainers.parts import LossOf, Passes, RankFacts, shared_digest
from offbeat.trainers.ranks.dispatch import pad_microbatches
from offbeat.trainers.ranks.peers import all_reduce_max_or_fail, run_on_all_ranks
from offbeat.trainers.teacher import check_tokenizers
from offbeat.trainers.torch.forward import (
    PassOptions,
    compute_packed_logprobs,
    compute_packed_logprobs_and_entropies,
    top_logprobs,
)
from offbeat.trainers.torch.loading import ModelLoader
from offbeat.trainers.torch.matrix_division import find_division
from offbeat.trainers.torch.pass_room import PassRoom, largest_tokens
from offbeat.trainers.torch.routing import ModelRouting
from offbeat.trainers.torch.sharding import reset_after_error, settle
from offbeat.transfer_queue.schema import (
    POLICY_LOGPROBS,
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    Columns,
)

T = TypeVar("T")


class TorchPasses(Passes[PackedRows]):
    """Passes of a model that is whole on one rank or sharded over several."""

    features_of: FeaturesOf | None = None
    """Source of the features of media, or None for the model's own encoder."""

    def __init__(
        self,
        model: PreTrainedModel,
        loader: ModelLoader,
        planner: MicrobatchPlanner,
        flops: ModelFlops | None,
        trainer: TorchTrainerConfig,
        *,
        plain_head: bool,
        check_reference: Callable[[str], None],
    ) -> None:
        """Watch the routers of the model, if it has any.

        Args:
            model: The trained model, sharded if there are several ranks.
            loader: Loads the reference and teachers.
            planner: Cuts groups into microbatches.
            flops: FLOPs of a pass, or None if they are unknown.
            trainer: Section of the recipe.
            plain_head: Whether the model's output head is one matrix without later operations.
            check_reference: Called with a weight digest. Raises if it differs from the digest of
                the initial weights.
        """
        self.model, self.planner = model, planner
        self._loader, self._peers, self._trained = loader, loader.peers, loader.trained
        self._dtype, self._flops, self._plain_head = loader.dtype, flops, plain_head
        self._check_reference = check_reference
        self._routing = ModelRouting(model, trainer.moe)
        self._tensor = trainer.tensor_parallel
        self.facts = RankFacts(
            model.device,
            planner.vocabulary,
            media_rules(model.config),
            replica=self._peers.rank // self._tensor,
            leads_replica=self._peers.rank % self._tensor == 0,
            expert_load=self._routing.load,
        )
        self.room = PassRoom(model.device)
        self._teachers: dict[str, PreTrainedModel] = {}  # by directory
        self._rng_at_begin = torch.get_rng_state()  # state of torch's CPU generator

    def begin_update(self) -> None:
        self._rng_at_begin = torch.get_rng_state()
        self.room.begin_step()

    def undo(self) -> None:
        torch.set_rng_state(self._rng_at_begin)

    # --- microbatches ----------------------------------------------------------------------------

    def cut(
        self, groups: Sequence[Columns], *, only_trained: bool
    ) -> tuple[Batch | None, list[PackedRows]]:
        return self.planner.cut(groups, only_trained=only_trained)

    def agree(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        what, own, failure = None, list[PackedRows](), None
        try:
            trains = during == "microbatch"
            what, own = self.room.fit(read, self._cut_smaller) if trains else read()
        except Exception as error:
            if self._peers.size == 1:
                raise
            failure = error
        token = max((each.padding_token for each in own), default=0)
        count, token = all_reduce_max_or_fail(self._peers, during, [len(own), token], failure)
        if self._tensor > 1:
            find_division().check_same_rows(self._peers, self._tensor, during, own)
        return cast("T", what), pad_microbatches(own, count, padding_microbatch(token))

    def _cut_smaller(self, tokens: int) -> None:
        """Limit microbatches to this many tokens from now on. Tensor ranks must share rows."""
        if self._tensor == 1:
            most = min(tokens, self.planner.max_tokens)
            self.planner = replace(self.planner, max_tokens=most)

    def count_work(self, microbatches: Sequence[PackedRows]) -> tuple[int, float]:
        return count_work(microbatches, self._flops)

    # --- passes ----------------------------------------------------------------------------------

    def add_gradients(
        self, microbatches: Sequence[PackedRows], loss_of: LossOf, loss: LossSpec
    ) -> None:
        options = PassOptions(plain_head=self._plain_head, features_of=self.features_of)
        with reset_after_error(self.model), self.room.measure_pass(largest_tokens(microbatches)):
            for packed in microbatches:
                with self._routing.count_tokens(packed, loss.config.normalize):
                    logprobs_N, entropy_N = compute_packed_logprobs_and_entropies(
                        self.model, packed, loss.temperature, self._dtype, **options
                    )
                    self._routing.forward_done()
                    if packed.is_padding:
                        summed = logprobs_N.sum() * 0.0
                    else:
                        summed = loss_of(packed, logprobs_N, entropy_N)
                    summed.backward()

    def router_biases(self) -> list[tuple[int, Tensor]]:
        return self._routing.biases()

    def logprobs(
        self, column: str, count: int, microbatches: Sequence[PackedRows], request: LogprobRequest
    ) -> NDArray[np.float32]:
        model = self.load(column, request.get("teacher"))
        plain_head = self._plain_head and column != TEACHER_LOGPROBS
        options = PassOptions(plain_head=plain_head, features_of=self.features_of)
        values = np.empty(count, np.float32)
        is_base = column == REFERENCE_LOGPROBS
        with reset_after_error(model), self._trained.as_base() if is_base else nullcontext():
            for packed in microbatches:
                logprobs_N = compute_packed_logprobs(
                    model, packed, request["temperature"], self._dtype, **options
                )
                if not packed.is_padding:
                    values[packed.source_N] = logprobs_N.float().cpu().numpy()
            settle(model)
        return values

    def top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        with self._trained.as_served():
            return top_logprobs(self.model, prompts, count, self.features_of)

    # --- other models ----------------------------------------------------------------------------

    def load(self, column: str, teacher: str | None) -> PreTrainedModel:
        if column == TEACHER_LOGPROBS:
            assert teacher is not None  # noqa: S101 -- the column is requested with it
            return self._teacher(teacher)
        is_own = column == POLICY_LOGPROBS or self._trained.base
        return self.model if is_own else self._reference

    def _teacher(self, path: str) -> PreTrainedModel:
        """Return the frozen model of a directory, loaded once and proved like the trained model.

        Each rank holds the whole teacher. So it is never gathered, and scores only this rank's
        groups.
        """

        def load_model() -> PreTrainedModel:
            check_tokenizers(path, self._loader.path)
            return self._loader.load_teacher(
                path, self.planner.vocabulary, shared_prompt=self.planner.shared_prompt
            )

        if path not in self._teachers:
            self._teachers[path] = run_on_all_ranks(self._peers, "the teacher", load_model)
        return self._teachers[path]

    @cached_property
    def _reference(self) -> PreTrainedModel:
        whole = self._loader.read("the reference")
        model = self._loader.make(whole).requires_grad_(requires_grad=False)
        weights = self._loader.shard(model, whole)
        self._check_reference(shared_digest(weights.iterate(), self._peers))
        return model

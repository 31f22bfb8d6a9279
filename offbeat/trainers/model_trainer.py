"""Base class of the trainers of real models: one rank's split step over sums of gradients.

Gradients accumulate as raw sums over microbatches and are divided once, at the end, by the valid
tokens or sequences of the whole step. So a step does not depend on how its groups were cut into
chunks or assigned to ranks, and ``train`` is the same step in one call.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Required, TypedDict, TypeVar, Unpack

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from offbeat.algorithms.divisors import AdvantageSums
from offbeat.algorithms.losses import LOSSES, LossSums, LossTokens
from offbeat.algorithms.tokens import Loss
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import LossConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.messages.training import ChunkResult, StepResult
from offbeat.trainers.backend import (
    Advantages,
    LogprobColumns,
    LogprobRequest,
    TopLogprobs,
    TrainerBackend,
    logged_failure,
    requested_columns,
)
from offbeat.trainers.batches.inputs import loss_tokens
from offbeat.trainers.batches.packing import Batch, PackedRows
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.expert_load import ExpertLoad
from offbeat.trainers.flops import ModelFlops, known_peak, tokens_and_pairs
from offbeat.trainers.held_columns import read_groups
from offbeat.trainers.minibatches import (
    HeldGroups,
    UpdateOutcome,
    combined_outcome,
    update_metrics,
)
from offbeat.trainers.movement import UpdateResult, check_moved
from offbeat.trainers.pass_timer import PassTimer
from offbeat.trainers.ranks.peers import Peers, SingleRank
from offbeat.trainers.schedule import learning_rate
from offbeat.trainers.step_sums import StepSums, StepTotals
from offbeat.trainers.weights import shared_digest, torch_dtype
from offbeat.weight_sync.wire_format import find_wire_format
from offbeat.weight_sync.wire_format_plugin import WireFormat

T = TypeVar("T")
LossOf = Callable[[PackedRows, Tensor, Tensor], Tensor]
"""(microbatch, log-probabilities [N], entropies [N]) -> a sum to differentiate."""


class RankOptions(TypedDict, total=False):
    """Arguments that the trainers of all backends have in common."""

    model: Required[ModelConfig]
    """Dtype of the weights, and whether code of the model directory may run."""

    total_steps: Required[int]
    """Number of steps at which the learning-rate schedule ends."""

    seed: int
    """Seed of the library's generators, for weights that the files lack; 0 by default."""

    peers: Peers | None
    """The ranks of the world, whose process group exists; None, the default: one rank."""

    losses: Mapping[str, Loss]
    """Losses by the name a recipe uses; by default the built-in ones."""


class TrainedGroups(NamedTuple):
    """One rank's groups of a chunk, as its loss reads them; None without groups."""

    batch: Batch
    inputs_of: Callable[[PackedRows, Tensor, Tensor], LossTokens]
    advantage_sums: AdvantageSums


def _advantage_sums(batch: Batch, advantages: Advantages) -> AdvantageSums:
    """Return those of the samples that are trained, in float64."""
    each = np.concatenate([np.asarray(part, np.float64) for part in advantages])
    trained = each[batch.wanted_samples]
    return AdvantageSums(float(len(trained)), float(np.square(trained).sum()))


class ModelTrainer(TrainerBackend):
    """One rank's trainer of a model.

    Every rank of a world makes one, and all make the same calls in the same order, each with its
    own share of the groups, which may be empty. Results are equal on all ranks, but for
    ``train_microbatch`` and ``prepare_logprobs``, which cover the share.

    One step, from the loss to the optimizer:

    1. ``_begin``: sums of zero, no gradients.
    2. ``_accumulate``, per chunk: ``MicrobatchPlanner.cut`` packs the share into microbatches.
    3. ``_add_gradients``, per microbatch: the forward pass gives the logprobs and entropies, ``loss_of``
       a sum over tokens, not a mean; ``backward`` adds its gradients. The sums go to ``StepSums``.
    4. ``_finish``: ``StepSums.totals`` reduces the sums over the ranks, once per optimizer step.
    5. ``_apply``: the optimizer divides the gradients by ``totals.denominator``, clips and steps.

    With several optimizer steps (``LossSpec.optimizer_steps``), 2 checks and holds the groups, and 4
    repeats 3 to 5 for each minibatch of each epoch.
    """

    _planner: MicrobatchPlanner  # every backend sets it
    _flops: ModelFlops | None  # of the model, likewise; None: they are not known

    def __init__(
        self, model_path: str | Path, optimizer: OptimizerConfig, **options: Unpack[RankOptions]
    ) -> None:
        """Load nothing yet.

        Args:
            model_path: Hugging Face directory. The KL penalty pulls towards this model.
            optimizer: The learning-rate schedule.
            options: The model and the world of ranks.
        """
        super().__init__()
        self.peers = options.get("peers") or SingleRank()
        self.is_first = self.peers.rank == 0
        self.model_path = Path(model_path)
        self._schedule, self._total_steps = optimizer, options["total_steps"]
        self._seed = options.get("seed", 0)
        self._losses = options.get("losses", LOSSES)
        self._dtype = torch_dtype(options["model"].dtype)
        self._sums: StepSums | None = None  # of the open step
        self._held = HeldGroups(1)  # the groups of the open step, if it takes several updates
        self.expert_load: ExpertLoad | None = None  # of a model with experts; every backend sets it
        self._teacher_path: str | None = None  # of the logprobs that are being computed

    def prepare_logprobs(
        self, chunk: TensorDictBase, **request: Unpack[LogprobRequest]
    ) -> list[LogprobColumns]:
        """Compute log-probabilities like the base class.

        Gradients of an open step stay. Reference and teacher are loaded when they are first needed.
        """
        self._teacher_path = request.get("teacher")
        batch, microbatches = self._prepared_on_all_ranks(
            "prepare_logprobs", lambda: self._planner.cut(read_groups(chunk), only_trained=False)
        )
        columns: list[LogprobColumns] = [{} for _ in range(len(chunk))]
        for name in requested_columns(request):
            count = 0 if batch is None else len(batch.tokens)
            with torch.no_grad():
                values = self._logprobs(name, count, microbatches, request["temperature"])
            for group, part in enumerate(np.split(values, batch.ends[:-1]) if batch else ()):
                columns[group][name] = part
        return columns

    def top_logprobs(
        self, prompts: Sequence[Sequence[int]], count: int, *, quantize: str | None = None
    ) -> TopLogprobs:
        if quantize is None:
            return self._top_logprobs(prompts, count)
        with self._quantized_matrices(find_wire_format(quantize)):
            return self._top_logprobs(prompts, count)

    def current_digest(self) -> str:
        """Return the digest like the base class; all ranks compute it if one of them has to."""
        (is_unknown,) = self.peers.all_reduce_max([self._current_digest is None])
        if is_unknown:
            self._current_digest = None
        return super().current_digest()

    def weights_digest(self) -> str:
        """Compute one digest over names and bytes of all weights. All ranks call it together."""
        return shared_digest(self.named_weights(), self.peers)

    # --- the step --------------------------------------------------------------------------------

    def _begin(self, loss: LossSpec) -> None:
        self._sums = StepSums(loss, replica=self._replica)
        self._held = HeldGroups(loss.minibatches)
        self._begin_update()

    def _begin_update(self) -> None:
        """Prepare for the first microbatch of an optimizer step."""
        self._begin_gradients()
        if self.expert_load is not None:
            self.expert_load.begin()

    def _accumulate(
        self, chunk: TensorDictBase, advantages: Advantages, minibatches: Sequence[int]
    ) -> ChunkResult:
        started, sums = time.perf_counter(), self._step
        with self._undone_if_raised():
            if sums.loss.optimizer_steps == 1:
                result = self._add_groups(chunk, advantages, sums)
            else:
                # Raises now for groups that cannot be trained, while the step may still be aborted.
                trained, _, result = self._read(chunk, advantages, sums)
                of_chunk = AdvantageSums() if trained is None else trained.advantage_sums
                self._held.add(chunk, advantages, minibatches, of_chunk)
        result = msgspec.structs.replace(result, compute_s=time.perf_counter() - started)
        sums.count_chunk(result.tokens, result.sequences, result.compute_s)
        return result

    def _add_groups(
        self, chunk: TensorDictBase, advantages: Advantages, sums: StepSums
    ) -> ChunkResult:
        """Add gradients and sums of this rank's groups; all ranks call it together."""

        def loss_of(packed: PackedRows, logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
            assert trained is not None  # noqa: S101 -- only groups have wanted tokens
            part = self._loss(trained.inputs_of(packed, logprobs_N, entropy_N), sums.loss.config)
            sums.add(part)
            return part.loss

        trained, microbatches, result = self._read(chunk, advantages, sums)
        timer = PassTimer(self._device)
        self._add_gradients(microbatches, loss_of, sums.loss.temperature)
        timer.stop()
        own = microbatches[: result.microbatches]  # the rest is padding
        tokens = sum(tokens_and_pairs(each)[0] for each in own)
        flops = 0.0 if self._flops is None else sum(map(self._flops.of, own))
        self._step.add_work(tokens, flops, timer.seconds)
        return result

    def _read(
        self, chunk: TensorDictBase, advantages: Advantages, sums: StepSums
    ) -> tuple[TrainedGroups | None, list[PackedRows], ChunkResult]:
        """Return this rank's groups as the loss reads them, their microbatches, and counts."""

        def read() -> tuple[tuple[TrainedGroups | None, int], list[PackedRows]]:
            groups = read_groups(chunk)
            batch, own = self._planner.cut(groups, only_trained=True)
            if batch is None:
                return (None, 0), own
            config, version = sums.loss.config, self.steps_applied
            inputs_of = loss_tokens(
                batch, groups, advantages, config, self._device, version=version
            )
            return (
                TrainedGroups(batch, inputs_of, _advantage_sums(batch, advantages)),
                len(own),
            ), own

        (trained, count), microbatches = self._prepared_on_all_ranks("microbatch", read)
        own = microbatches[:count]  # the rest is padding
        tokens = sum(len(each.source_N) for each in own)
        sequences = 0 if trained is None else len(trained.batch.wanted_samples)
        return trained, microbatches, ChunkResult(tokens, sequences, count, compute_s=0.0)

    def _loss(self, inputs: LossTokens, config: LossConfig) -> LossSums:
        return self._losses[config.name](inputs, config)

    def _finish(self) -> StepResult:
        started, sums = time.perf_counter(), self._step
        with self._undone_if_raised():
            rate = learning_rate(self._schedule, self.steps_applied, self._total_steps)
            outcomes = list[UpdateOutcome]()
            for part in self._sums_of_updates():
                totals = self._totals(part)
                outcomes.append(UpdateOutcome(totals, *self._update(totals, rate)))
            counts = self._totals(sums) if len(outcomes) > 1 else outcomes[0].totals
        logged_failure(self._close_sums)
        of_all = combined_outcome(outcomes, sums.loss)
        self.steps_applied += not of_all.reason
        load = {} if self.expert_load is None else self.expert_load.take_metrics()
        took_s = time.perf_counter() - started
        return StepResult(
            applied=not of_all.reason,
            loss=of_all.totals.loss,
            grad_norm=of_all.grad_norm,
            learning_rate=rate,
            tokens=counts.tokens,
            sequences=counts.sequences,
            chunks=sums.chunks,
            metrics=of_all.totals.metrics | update_metrics(outcomes) | load,
            reason=of_all.reason,
            compute_s=sums.compute_s + took_s,
            speed=counts.speed(known_peak(self._device, self._dtype)),
        )

    def _sums_of_updates(self) -> Iterator[StepSums]:
        """Yield the sums of each optimizer step while its gradients are there; all ranks together."""
        step = self._step
        if step.loss.optimizer_steps == 1:
            yield step
            return
        for chunk, advantages in self._held.in_order(step.loss.epochs):
            self._discard_gradients()
            self._begin_update()
            sums = StepSums(step.loss, of_batch=self._held.advantage_sums)
            result = self._add_groups(chunk, advantages, sums)
            sums.count_chunk(result.tokens, result.sequences, 0.0)
            yield sums

    def _totals(self, sums: StepSums) -> StepTotals:
        return sums.totals(self.peers, contributes=self._is_replica_leader)

    def _update(self, totals: StepTotals, rate: float) -> tuple[float, str]:
        """Return the gradient norm, and why the weights were not updated; equal on all ranks."""
        if totals.refusal:
            return 0.0, totals.refusal
        applied, norm, movement = self._apply(totals.denominator, rate)
        if not applied:
            return norm, f"gradient norm is {norm}"
        step = self.steps_applied + 1
        check_moved(self.peers, movement, step=step, learning_rate=rate, grad_norm=norm)
        if self.expert_load is not None:
            self.expert_load.apply(self._router_biases())
        return norm, ""

    def _drop(self) -> None:
        self._close_sums()

    def _close_sums(self) -> None:
        self._sums, self._held = None, HeldGroups(1)  # whatever becomes of the gradients
        self._discard_gradients()

    @property
    def _step(self) -> StepSums:
        assert self._sums is not None  # noqa: S101 -- the guard lets nothing through otherwise
        return self._sums

    # --- of each backend -------------------------------------------------------------------------

    @property
    @abstractmethod
    def _device(self) -> torch.device: ...

    @property
    def _is_replica_leader(self) -> bool:
        """Return whether this rank contributes its replica's sums to those of the step."""
        return True

    @property
    def _replica(self) -> int:
        """Return the number of the replica, whose ranks train the same groups."""
        return self.peers.rank

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by Hugging Face name, in a fixed order; tied ones once. All ranks."""

    @abstractmethod
    def _prepared_on_all_ranks(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        """Return what ``read`` returned, its microbatches followed by padding.

        Afterwards ranks that compute together have equally many microbatches.

        Raises:
            Exception: What ``read`` raised, here; on the other ranks ``PeerFailed``.
        """

    @abstractmethod
    def _logprobs(
        self, name: str, count: int, microbatches: Sequence[PackedRows], temperature: float
    ) -> NDArray[np.float32]:
        """Return [count] log-probabilities under the policy or the reference; see ``name``."""

    @abstractmethod
    def _top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        """Return ``top_logprobs`` by the weights as they are."""

    @abstractmethod
    def _quantized_matrices(self, wire_format: WireFormat) -> AbstractContextManager[None]:
        """Return a context in which the matrices of a format have the values that engines compute with."""

    @abstractmethod
    def _model_of(self, name: str) -> object:
        """Return what computes a column of logprobs. All ranks load it together at the first call."""

    @abstractmethod
    def _begin_gradients(self) -> None:
        """Prepare for the first microbatch of a step, without gradients."""

    @abstractmethod
    def _add_gradients(
        self, microbatches: Sequence[PackedRows], loss_of: LossOf, temperature: float
    ) -> None:
        """Run forward and backward passes. ``loss_of`` is not called for padding."""

    @abstractmethod
    def _apply(self, denominator: float, rate: float) -> UpdateResult:
        """Normalise and clip the gradients and update the weights, if the norm is finite."""

    def _router_biases(self) -> list[tuple[int, Tensor]]:
        """Return this rank's routers that choose experts by a bias: index of the layer, and bias [E]."""
        return []

    @abstractmethod
    def _discard_gradients(self) -> None:
        """Discard all gradients of the step. Idempotent."""

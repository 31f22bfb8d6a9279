"""Trainer of a real model, built from parts: one rank's split step over sums of gradients.

Gradients accumulate as raw sums over microbatches. At the end they are divided once, by the valid
tokens or sequences of the whole step. So a step does not depend on how its groups were cut into
chunks or assigned to ranks, and ``train`` is the same step in one call.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Required, TypedDict, Unpack

import msgspec
import numpy as np
import torch
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
from offbeat.models.media_rules import MediaRules
from offbeat.trainers.backend import (
    Advantages,
    LogprobColumns,
    LogprobRequest,
    TopLogprobs,
    TrainerBackend,
    list_requested_columns,
    log_failure,
)
from offbeat.trainers.batches.inputs import loss_tokens
from offbeat.trainers.batches.packing import Batch, PackedRows
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.checkpoints.weight_files import FILE_BYTES
from offbeat.trainers.expert_load import ExpertLoad
from offbeat.trainers.flops import PassTimer, known_peak
from offbeat.trainers.held_columns import read_groups
from offbeat.trainers.movement import check_moved
from offbeat.trainers.parts import ModelState, Passes, Updates, shared_digest, torch_dtype
from offbeat.trainers.ranks.peers import Peers, SingleRank
from offbeat.trainers.step_sums import (
    HeldGroups,
    StepSums,
    StepTotals,
    UpdateOutcome,
    combine_outcomes,
    update_metrics,
)
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.wire_format import find_wire_format


def learning_rate(config: OptimizerConfig, applied: int, total: int) -> float:
    """Return the learning rate of the next step, after ``applied`` of ``total`` steps.

    Warm-up rises linearly from 0 and reaches the peak at step ``warmup_steps``. Then ``linear`` and
    ``cosine`` fall to ``min_learning_rate``, which they reach when the last step is done. ``wsd``
    falls only in the last ``decay_steps``, by ``1 - sqrt`` (arXiv:2405.18392, section 3.1;
    Megatron-LM's ``minus_sqrt``). Even with a minimum of 0, no step of the run has rate 0.
    """
    if applied < config.warmup_steps:
        return config.learning_rate * (applied + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    begin = config.warmup_steps
    if config.schedule == "wsd":
        begin = max(begin, total - (config.decay_steps or 0))
    done = min(1.0, max(0.0, (applied - begin) / max(1, total - begin)))
    share = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "wsd": 1 - math.sqrt(done),
    }[config.schedule]
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * share


class RankOptions(TypedDict, total=False):
    """Arguments that the trainers of all backends have in common."""

    model: Required[ModelConfig]
    """Dtype of the weights, and whether code of the model directory may run."""

    total_steps: Required[int]
    """Number of steps at which the learning-rate schedule ends."""

    seed: int
    """Seed of the library's generators, for weights that are missing in the files. 0 by default."""

    peers: Peers | None
    """The ranks of the world, whose process group exists, or None (the default) for one rank."""

    losses: Mapping[str, Loss]
    """Losses by the name that a recipe uses. By default the built-in losses."""


class TrainedGroups(NamedTuple):
    """One rank's groups of a chunk, in the form that its loss reads. Fields are None if empty."""

    batch: Batch
    inputs_of: Callable[[PackedRows, Tensor, Tensor], LossTokens]
    advantage_sums: AdvantageSums


def _advantage_sums(batch: Batch, advantages: Advantages) -> AdvantageSums:
    """Return the advantage sums of the trained samples, in float64."""
    each = np.concatenate([np.asarray(part, np.float64) for part in advantages])
    trained = each[batch.wanted_samples]
    return AdvantageSums(float(len(trained)), float(np.square(trained).sum()))


class ModelTrainer(TrainerBackend):
    """One rank's trainer of a model, built from parts: passes, updates and state.

    Every rank of a world creates a trainer. All ranks make the same calls in the same order, each
    with its own share of the groups, which may be empty. Results are equal on all ranks, except for
    ``train_microbatch`` and ``prepare_logprobs``, which cover the share.

    One step, from the loss to the optimizer:

    1. ``_begin``: sums of zero, no gradients.
    2. ``_accumulate``, per chunk: ``Passes.cut`` packs the share into microbatches.
    3. ``Passes.add_gradients``: the forward pass of each microbatch returns logprobs and entropies.
       ``loss_of`` returns a sum over tokens, not a mean. ``backward`` adds its gradients.
       ``StepSums`` receives the sums.
    4. ``_finish``: ``StepSums.totals`` reduces the sums over the ranks, once per optimizer step.
    5. ``Updates.step``: the optimizer divides the gradients by ``totals.denominator``, clips,
       steps.

    With several optimizer steps (``LossSpec.optimizer_steps``), item 2 only checks and holds the
    groups. Then item 4 runs items 3 to 5 for each minibatch of each epoch.
    """

    # Every backend sets these
    passes: Passes[Any]
    updates: Updates
    model_state: ModelState

    def __init__(
        self, model_path: str | Path, optimizer: OptimizerConfig, **options: Unpack[RankOptions]
    ) -> None:
        """Store the arguments. The constructor loads nothing.

        Args:
            model_path: Hugging Face directory. Its model is the reference of the KL penalty.
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
        self._sums: StepSums | None = None  # sums of the open step
        self._held = HeldGroups(1)  # groups of the open step if it has several updates

    def prepare_logprobs(
        self, chunk: TensorDictBase, **request: Unpack[LogprobRequest]
    ) -> list[LogprobColumns]:
        """Compute log-probabilities like the base class.

        Gradients of an open step are unchanged. Reference and teacher are loaded at first use.
        """
        batch, microbatches = self.passes.agree(
            "prepare_logprobs", lambda: self.passes.cut(read_groups(chunk), only_trained=False)
        )
        columns: list[LogprobColumns] = [{} for _ in range(len(chunk))]
        for name in list_requested_columns(request):
            count = 0 if batch is None else len(batch.tokens)
            with torch.no_grad():
                values = self.passes.logprobs(name, count, microbatches, request)
            for group, part in enumerate(np.split(values, batch.ends[:-1]) if batch else ()):
                columns[group][name] = part
        return columns

    def top_logprobs(
        self, prompts: Sequence[Sequence[int]], count: int, *, quantize: str | None = None
    ) -> TopLogprobs:
        if quantize is None:
            return self.passes.top_logprobs(prompts, count)
        with self.model_state.quantize_weights(find_wire_format(quantize)):
            return self.passes.top_logprobs(prompts, count)

    @property
    def vocabulary(self) -> int:
        return self.passes.facts.vocabulary

    @property
    def media_rules(self) -> MediaRules:
        return self.passes.facts.media_rules

    @property
    def expert_load(self) -> ExpertLoad | None:
        """Return the load of the experts, or None for a model without experts."""
        return self.passes.facts.expert_load

    # --- the state -------------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        return self.model_state.identity

    @property
    def state_nbytes(self) -> int:
        return self.model_state.nbytes

    @property
    def parameters(self) -> int:
        return self.model_state.parameters

    def iterate_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by Hugging Face name, in a fixed order, tied weights once.

        All ranks must call it together.
        """
        return self.model_state.iterate_weights()

    def held_regions(self) -> list[TensorRegion]:
        """Return this rank's regions of the weights, in the memory that training updates."""
        return self.model_state.held_regions()

    def save(self, directory: str | Path, *, file_bytes: int = FILE_BYTES) -> None:
        """Write a Hugging Face directory as ``ModelState.export`` does.

        All ranks must call it together.
        """
        self.model_state.export(Path(directory), file_bytes=file_bytes)

    def _save(self, directory: Path) -> None:
        self.model_state.save(directory)

    def _load(self, directory: Path) -> None:
        self.model_state.load(directory)

    def _initialise(self) -> None:
        self.model_state.reset()

    def current_digest(self) -> str:
        """Return the digest like the base class. If any rank has to compute it, all ranks do."""
        (is_unknown,) = self.peers.all_reduce_max([self._current_digest is None])
        if is_unknown:
            self._current_digest = None
        return super().current_digest()

    def weights_digest(self) -> str:
        """Compute one digest over names and bytes of all weights.

        All ranks must call it together.
        """
        return shared_digest(self.iterate_weights(), self.peers)

    # --- the step --------------------------------------------------------------------------------

    def _begin(self, loss: LossSpec) -> None:
        self._sums = StepSums(loss, replica=self.passes.facts.replica)
        self._held = HeldGroups(loss.minibatches)
        self.passes.begin_step()
        self._begin_update()

    def _begin_update(self) -> None:
        """Prepare for the first microbatch of an optimizer step."""
        self.passes.begin_update()
        self.updates.begin()
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
                # Raises now if groups cannot be trained, while the step may still be aborted
                trained, _, result = self._read(chunk, advantages, sums)
                of_chunk = AdvantageSums() if trained is None else trained.advantage_sums
                self._held.add(chunk, advantages, minibatches, of_chunk)
        result = msgspec.structs.replace(result, compute_s=time.perf_counter() - started)
        sums.count_chunk(result.tokens, result.sequences, result.compute_s)
        return result

    def _add_groups(
        self, chunk: TensorDictBase, advantages: Advantages, sums: StepSums
    ) -> ChunkResult:
        """Add gradients and sums of this rank's groups. All ranks must call it together."""

        def compute_loss(packed: PackedRows, logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
            assert trained is not None  # noqa: S101 -- only groups have wanted tokens
            part = self._loss(trained.inputs_of(packed, logprobs_N, entropy_N), sums.loss.config)
            sums.add(part)
            return part.loss

        trained, microbatches, result = self._read(chunk, advantages, sums)
        timer = PassTimer(self.passes.facts.device)
        self.passes.add_gradients(microbatches, compute_loss, sums.loss)
        timer.stop()
        work = self.passes.count_work(microbatches[: result.microbatches])  # the rest is padding
        if work is not None:
            self._step.add_work(*work, timer.seconds)
        return result

    def _read(
        self, chunk: TensorDictBase, advantages: Advantages, sums: StepSums
    ) -> tuple[TrainedGroups | None, list[Any], ChunkResult]:
        """Return this rank's groups as input of the loss, their microbatches, and counts."""
        device = self.passes.facts.device

        def read() -> tuple[tuple[TrainedGroups | None, int], list[Any]]:
            groups = read_groups(chunk)
            batch, own = self.passes.cut(groups, only_trained=True)
            if batch is None:
                return (None, 0), own
            config, version = sums.loss.config, self.steps_applied
            inputs_of = loss_tokens(batch, groups, advantages, config, device, version=version)
            return (
                TrainedGroups(batch, inputs_of, _advantage_sums(batch, advantages)),
                len(own),
            ), own

        (trained, count), microbatches = self.passes.agree("microbatch", read)
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
        log_failure(self._close_sums)
        of_all = combine_outcomes(outcomes, sums.loss)
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
            metrics=of_all.totals.metrics | update_metrics(outcomes) | load | self.passes.measure(),
            reason=of_all.reason,
            compute_s=sums.compute_s + took_s,
            speed=counts.speed(known_peak(self.passes.facts.device, self._dtype)),
        )

    def _sums_of_updates(self) -> Iterator[StepSums]:
        """Yield the sums of each optimizer step while its gradients exist.

        All ranks must call it.
        """
        step = self._step
        if step.loss.optimizer_steps == 1:
            yield step
            return
        for chunk, advantages in self._held.in_order(step.loss.epochs):
            self.updates.drop_gradients()
            self._begin_update()
            sums = StepSums(step.loss, of_batch=self._held.advantage_sums)
            result = self._add_groups(chunk, advantages, sums)
            sums.count_chunk(result.tokens, result.sequences, 0.0)
            yield sums

    def _totals(self, sums: StepSums) -> StepTotals:
        return sums.totals(self.peers, contributes=self.passes.facts.leads_replica)

    def _update(self, totals: StepTotals, rate: float) -> tuple[float, str]:
        """Return the gradient norm, and why no update was made. Both are equal on all ranks."""
        if totals.refusal:
            return 0.0, totals.refusal
        applied, norm, movement = self.updates.step(totals.denominator, rate)
        if not applied:
            return norm, f"gradient norm is {norm}"
        step = self.steps_applied + 1
        check_moved(self.peers, movement, step=step, learning_rate=rate, grad_norm=norm)
        if self.expert_load is not None:
            self.expert_load.apply(self.passes.router_biases())
        return norm, ""

    def _drop(self) -> None:
        if self._sums is not None:
            self.passes.undo()
        self._close_sums()

    def _close_sums(self) -> None:
        self._sums, self._held = None, HeldGroups(1)  # even if discarding the gradients fails
        self.updates.drop_gradients()

    @property
    def _step(self) -> StepSums:
        assert self._sums is not None  # noqa: S101 -- the guard checks this before the call
        return self._sums

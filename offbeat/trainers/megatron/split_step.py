"""Megatron trainer of one rank: the split step over tensor, pipeline, data and expert parallelism.

Every rank of a world makes one, and all make the same calls in the same order. A rank receives its
data-parallel share of the groups; ranks of one replica receive the same.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.algorithms.losses import LOSSES, LossTokens
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TrainerConfig
from offbeat.messages.training import ChunkResult, LossSpec, StepResult
from offbeat.model_proof.loading import check_files
from offbeat.trainers.backend import Advantages, LogprobColumns, TopLogprobs, TrainerBackend
from offbeat.trainers.batches.inputs import loss_tokens
from offbeat.trainers.batches.packing import Batch, PackedRows, rows_of
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.megatron.architecture import read_architecture
from offbeat.trainers.megatron.forward import Forward
from offbeat.trainers.megatron.gathering import TensorGather
from offbeat.trainers.megatron.groups import pipeline_group, start_groups
from offbeat.trainers.megatron.hf_directory import save_directory
from offbeat.trainers.megatron.hf_files import load_boxes
from offbeat.trainers.megatron.mapping import TensorBox, boxes_of
from offbeat.trainers.megatron.microbatches import aligned
from offbeat.trainers.megatron.model import build_model, in_data_parallel, transformer_config
from offbeat.trainers.megatron.parts import BackendParts, optimizer_for
from offbeat.trainers.megatron.state import WEIGHTS, SavedShares, save_share
from offbeat.trainers.movement import check_moved
from offbeat.trainers.ranks.peers import Peers, SingleRank, WorldBroken, line_of, run_on_all_ranks
from offbeat.trainers.schedule import learning_rate
from offbeat.trainers.step_sums import RankSums, StepSums, StepTotals
from offbeat.trainers.torch.logprobs import largest_logprobs
from offbeat.trainers.weights import torch_dtype, weights_digest
from offbeat.transfer_queue.schema import POLICY_LOGPROBS, REFERENCE_LOGPROBS, Columns

T = TypeVar("T")
_KEPT: Final = msgspec.msgpack.Decoder(TopLogprobs | None)
MakeTokens = Callable[[PackedRows, Tensor], LossTokens]
_LEADER_SUMS: Final = msgspec.msgpack.Decoder[RankSums | None](RankSums | None)


class MegatronTrainer(TrainerBackend):
    """One rank's share of a model, its gradients and its optimizer."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        trainer: TrainerConfig,
        model: ModelConfig,
        total_steps: int,
        seed: int = 0,
        peers: Peers | None = None,
        parts: BackendParts | None = None,
    ) -> None:
        """Create the process groups and load this rank's share.

        Args:
            model_path: Hugging Face directory with safetensors files. The KL penalty pulls towards
                this model.
            trainer: Parallel sizes, packing and optimizer.
            model: Dtype of the weights.
            total_steps: Number of steps at which the learning-rate schedule ends.
            seed: Seed of the library's generators, which nothing draws from.
            peers: The ranks of the world, whose process group exists. None: one rank.
            parts: Replacements of the default parts.

        Raises:
            UntrainableModel: This kind of model has no mapping here.
            WeightsMismatch: The files are not those of their config's model.
            UnsupportedLayout: The model or the world cannot be partitioned like this.
        """
        super().__init__()
        self._peers, self._parts = peers or SingleRank(), parts or BackendParts()
        self.is_first = self._peers.rank == 0
        self.model_path = Path(model_path)
        self._config, self._total_steps, self._seed = trainer, total_steps, seed
        self._dtype = torch_dtype(model.dtype)
        self.architecture = read_architecture(model_path)
        run_on_all_ranks(
            self._peers, "its start", lambda: self.is_first and check_files(model_path)
        )
        self.layout = start_groups(trainer, self._peers)
        self.transformer = self._description()
        self.model = self._build(self.transformer)
        optimizer = self._parts.optimizer or optimizer_for(self._device, self._dtype)
        self.ddp = in_data_parallel(
            self.model,
            self.transformer,
            overlap=self._parts.overlap_grad_reduce,
            sharded=optimizer.sharded,
        )
        self._forward = self._forward_of(self.ddp, self.model)
        self.gradients = self._parts.gradients(self.ddp, self.transformer)
        self.boxes = self._boxes_of(self.model)
        self.gathering = TensorGather(self.boxes, self._peers)
        self.optimizer = optimizer(self.ddp, trainer.optimizer, self.gathering.owned())
        a = self.architecture
        self._planner = MicrobatchPlanner(
            trainer.max_tokens_per_microbatch,
            trainer.shared_prompt,
            ratio_tokens=a.layer_weights / (2 * a.hidden),
            vocabulary=a.vocabulary,
        )
        self._sums: StepSums | None = None
        self.initial_digest = self.weights_digest()

    # --- log-probabilities -----------------------------------------------------------------------

    def prepare_logprobs(
        self, groups: Sequence[Columns], *, policy: bool, reference: bool, temperature: float
    ) -> list[LogprobColumns]:
        """Compute log-probabilities like the base class; equal on all ranks of a replica."""
        asked = ((POLICY_LOGPROBS, policy), (REFERENCE_LOGPROBS, reference))
        batch, microbatches = self._prepared_on_all_ranks(
            "prepare_logprobs", lambda: self._planner.cut(groups, only_trained=False)
        )
        columns: list[LogprobColumns] = [{} for _ in groups]
        for name in (name for name, wanted in asked if wanted):
            forward = self._forward if name == POLICY_LOGPROBS else self._reference
            values = self._logprobs(forward, batch, microbatches, temperature)
            if batch is not None:
                for group, part in enumerate(np.split(values, batch.ends[:-1])):
                    columns[group][name] = part
        return columns

    @torch.no_grad()
    def _logprobs(
        self,
        forward: Forward,
        batch: Batch | None,
        microbatches: Sequence[PackedRows],
        temperature: float,
    ) -> NDArray[np.float32]:
        count = 0 if batch is None else len(batch.tokens)
        values = torch.zeros(count, dtype=torch.float32, device=self._device)

        def keep(packed: PackedRows, logprobs_N: Tensor) -> Tensor:
            source_N = torch.from_numpy(packed.source_N).to(self._device)
            values[source_N] = logprobs_N.float()
            return logprobs_N.sum()

        with self._no_message_unread():
            forward.run(microbatches, keep, temperature, backward=False)
        if self.layout.pipeline > 1:
            last = dist.get_process_group_ranks(pipeline_group())[-1]
            dist.broadcast(values, src=last, group=pipeline_group())
        return values.cpu().numpy()

    @property
    def vocabulary(self) -> int:
        return self.architecture.vocabulary

    @torch.no_grad()
    def top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        (rows,) = aligned([rows_of(prompts)], self.transformer)
        with self._no_message_unread():
            logits_PV = self._forward.logits(rows)
        kept = None if logits_PV is None else largest_logprobs(logits_PV, count)
        gathered = self._peers.all_gather(
            kept, _KEPT
        )  # the first rank need not be on the last stage
        return next(each for each in gathered if each is not None)

    # --- weights in and out ----------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """Return the number of weights of the whole model; tied weights count once."""
        return sum(math.prod(shape) for shape in self.gathering.shapes.values())

    @property
    def local_weights(self) -> dict[str, Tensor]:
        """Return this rank's share of the weights, by the library's names."""
        return {name: each.detach() for name, each in self.model.named_parameters()}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights in order of their Hugging Face names; tied ones once. All ranks call it."""
        return self.gathering.all_tensors(self.local_weights)

    def metas(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return name, shape and dtype of every weight, in the order of ``named_weights``."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [(name, shape, dtype) for name, shape in self.gathering.shapes.items()]

    def weights_digest(self) -> str:
        """Return one digest over names and bytes of all weights, equal under every layout. All ranks."""
        return weights_digest(self.named_weights())

    def save(self, directory: str | Path) -> None:
        """Write a Hugging Face directory with the model path's tokenizer; atomic. All ranks call it."""
        save_directory(
            self.named_weights(), Path(directory), self.model_path, self._dtype, self._peers
        )

    @property
    def identity(self) -> Identity:
        """Return an identity that is equal under every layout: a state may be loaded under another."""
        digest = xxhash.xxh3_128()
        for name, shape, dtype in self.metas():
            digest.update(f"{name} {shape} {dtype}\n".encode())
        dtype = str(self._dtype).removeprefix("torch.")
        about = f"{self.architecture.name} of {self.parameters:,} {dtype} weights"
        return Identity("megatron", about, digest.hexdigest())

    @property
    def state_nbytes(self) -> int:
        """Return the bytes of all ranks' shares together."""
        return self.parameters * (self._dtype.itemsize + self.optimizer.bytes_a_weight)

    def _save(self, directory: Path) -> None:
        kinds = {WEIGHTS: self.local_weights, **self.optimizer.state()}
        owned = self.gathering.owned()
        save_share(directory, dist.get_rank(), owned, kinds, self.optimizer.steps)

    def _load(self, directory: Path) -> None:
        with SavedShares(directory) as saved:
            saved.fill(WEIGHTS, self.local_weights, self.boxes)
            kinds = dict[str, dict[str, Tensor]]()
            for kind in self.optimizer.kinds(saved.steps):
                values = {name: self.optimizer.like(name) for name in self.local_weights}
                saved.fill(kind, values, self.boxes)
                kinds[kind] = values
            self.optimizer.load(kinds, saved.steps)

    def _initialise(self) -> None:
        load_boxes(self.local_weights, self.boxes, self.model_path)
        self.optimizer.reset()

    # --- the step --------------------------------------------------------------------------------

    def _begin(self, loss: LossSpec) -> None:
        self._sums = StepSums(loss)
        self.gradients.begin()

    def _accumulate(self, groups: Sequence[Columns], advantages: Advantages) -> ChunkResult:
        started, sums = time.perf_counter(), self._step

        def read() -> tuple[tuple[Batch, MakeTokens] | None, list[PackedRows]]:
            batch, own = self._planner.cut(groups, only_trained=True)
            if batch is None:
                return None, []
            spec, version = sums.spec, self.steps_applied
            make = loss_tokens(batch, groups, advantages, spec, self._device, version=version)
            return (batch, make), own

        def loss(packed: PackedRows, logprobs_N: Tensor) -> Tensor:
            assert what is not None  # noqa: S101 -- only groups have wanted tokens
            _, make_tokens = what
            part = LOSSES[sums.spec.name](make_tokens(packed, logprobs_N), sums.spec)
            sums.add(part)
            return part.loss

        with self._undone_if_raised():
            what, microbatches = self._prepared_on_all_ranks("microbatch", read)
            temperature = sums.spec.temperature
            with self._no_message_unread():
                self.gradients.accumulate(
                    lambda: self._forward.run(microbatches, loss, temperature, backward=True)
                )
        own = [each for each in microbatches if len(each.source_N)]
        tokens = sum(len(each.source_N) for each in own)
        sequences = 0 if what is None else sum(_sequences(what[0], each) for each in own)
        compute_s = time.perf_counter() - started
        sums.tokens, sums.sequences = sums.tokens + tokens, sums.sequences + sequences
        sums.chunks, sums.compute_s = sums.chunks + 1, sums.compute_s + compute_s
        return ChunkResult(tokens, sequences, len(own), compute_s)

    def _prepared_on_all_ranks(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        """Return what ``read`` returned, with its microbatches aligned with the other ranks'.

        Raises:
            Exception: What ``read`` raised, here; on the other ranks ``PeerFailed``.
        """
        what, own = run_on_all_ranks(self._peers, during, read)
        return what, aligned(own, self.transformer)

    def _finish(self) -> StepResult:
        started, sums = time.perf_counter(), self._step
        with self._undone_if_raised():
            totals = self._totals(sums)
            rate = learning_rate(self._config.optimizer, self.steps_applied, self._total_steps)
            norm, reason = self._update(totals, rate)
        self._drop()
        self.steps_applied += not reason
        took_s = time.perf_counter() - started
        return sums.result(totals, reason=reason, grad_norm=norm, rate=rate, finish_s=took_s)

    def _totals(self, sums: StepSums) -> StepTotals:
        """Return the step's sums over data-parallel ranks; one rank per replica contributes."""
        gathered = self._peers.all_gather(
            sums.own() if self.layout.is_replica_leader else None, _LEADER_SUMS
        )
        return StepTotals(sums.spec, [each for each in gathered if each is not None])

    def _update(self, totals: StepTotals, rate: float) -> tuple[float, str]:
        """Return the gradient norm, and why the weights were not updated; empty if they were."""
        if totals.refusal:
            return 0.0, totals.refusal
        self.gradients.reduce(totals.denominator)
        norm = self.optimizer.grad_norm()
        if not math.isfinite(norm):
            return norm, f"gradient norm is {norm}"
        movement = self.optimizer.step(norm, rate)
        step = self.steps_applied + 1
        check_moved(self._peers, movement, step=step, learning_rate=rate, grad_norm=norm)
        return norm, ""

    def _drop(self) -> None:
        """Restore the hooks, discard gradients and step. Idempotent."""
        self.gradients.restore()
        self.gradients.zero()
        self._sums = None

    @contextmanager
    def _undone_if_raised(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._drop()
            raise

    @contextmanager
    def _no_message_unread(self) -> Iterator[None]:
        """Declare the world broken if a pipeline stage fails: unread messages would be read later.

        Raises:
            WorldBroken: An error was raised in the block, with several pipeline stages.
        """
        try:
            yield
        except Exception as error:
            if self.layout.pipeline == 1:
                raise
            detail = f"{type(error).__name__}: {line_of(error)}"
            raise WorldBroken(self._peers.rank, "the pipeline", detail) from error

    @property
    def _step(self) -> StepSums:
        assert self._sums is not None  # noqa: S101 -- the guard lets nothing through otherwise
        return self._sums

    # --- how it is put together --------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _description(self) -> TransformerConfig:
        return transformer_config(
            self.architecture,
            self.layout,
            self._dtype,
            sequence_parallel=self._config.sequence_parallel,
            recompute=self._config.activation_checkpointing,
        )

    def _build(self, config: TransformerConfig) -> GPTModel:
        model = build_model(self.architecture, config, self.layout, self._seed)
        parameters = {name: each.detach() for name, each in model.named_parameters()}
        load_boxes(parameters, self._boxes_of(model), self.model_path)
        return model

    def _boxes_of(self, model: GPTModel) -> list[TensorBox]:
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        return boxes_of(shapes, self.architecture, self.layout)

    def _forward_of(self, wrapped: nn.Module, model: GPTModel) -> Forward:
        return Forward(wrapped, model, self.layout, self.architecture.vocabulary)

    @cached_property
    def _reference(self) -> Forward:
        model = self._build(self._description()).requires_grad_(requires_grad=False)
        held = dict(model.named_parameters())
        self._check_initial(weights_digest(self.gathering.all_tensors(held)))
        return self._forward_of(model, model)


def _sequences(batch: Batch, packed: PackedRows) -> int:
    return len(np.unique(batch.sample[packed.source_N]))

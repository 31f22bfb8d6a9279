"""Megatron trainer of one rank, with tensor, pipeline, context, data and expert parallelism.

A rank receives its data-parallel share of the groups; ranks of one replica receive the same.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# megatron-core has no types.

import math
from collections.abc import Callable, Generator, Iterator, Sequence
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

from offbeat.config.limits import microbatch_tokens
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import MegatronTrainerConfig
from offbeat.model_proof.loading import check_files
from offbeat.multimodal.picture_rules import PictureRules
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.expert_load import SHARES, ExpertLoad
from offbeat.trainers.megatron.architecture import (
    check_balanced,
    check_recomputed,
    read_architecture,
)
from offbeat.trainers.megatron.forward import Forward
from offbeat.trainers.megatron.gathering import TensorGather
from offbeat.trainers.megatron.groups import pipeline_group, start_groups
from offbeat.trainers.megatron.hf_directory import save_directory
from offbeat.trainers.megatron.hf_files import load_boxes, view_of
from offbeat.trainers.megatron.mapping import TensorBox, boxes_of, is_router_bias
from offbeat.trainers.megatron.microbatches import aligned, canary_rows
from offbeat.trainers.megatron.model import (
    build_model,
    in_data_parallel,
    transformer_config,
    weights_of,
)
from offbeat.trainers.megatron.parts import BackendParts, optimizer_for
from offbeat.trainers.megatron.router import ExpertRouter
from offbeat.trainers.megatron.state import WEIGHTS, SavedShares, save_share
from offbeat.trainers.megatron.tower import (
    attach_tower,
    features_by,
    names_in_files,
    tower_of,
)
from offbeat.trainers.model_trainer import LossOf, ModelTrainer
from offbeat.trainers.movement import UpdateResult
from offbeat.trainers.ranks.peers import Peers, WorldBroken, line_of, run_on_all_ranks
from offbeat.trainers.torch.logprobs import largest_logprobs
from offbeat.trainers.weights import weights_digest
from offbeat.transfer_queue.schema import POLICY_LOGPROBS
from offbeat.weight_sync.receiver import TensorRegion

T = TypeVar("T")
_KEPT: Final = msgspec.msgpack.Decoder(TopLogprobs | None)


class MegatronTrainer(ModelTrainer):
    """One rank's share of a model, its gradients and its optimizer."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        trainer: MegatronTrainerConfig,
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
        super().__init__(
            model_path,
            optimizer=trainer.optimizer,
            model=model,
            total_steps=total_steps,
            seed=seed,
            peers=peers,
        )
        self._config, self._parts = trainer, parts or BackendParts()
        self.architecture = read_architecture(model_path)
        # Of a model without pictures the names are those of the files.
        self._file_names = names_in_files(self.model_path) if self.picture_rules else {}
        run_on_all_ranks(self.peers, "its start", lambda: self.is_first and check_files(model_path))
        self.layout = start_groups(trainer, self.peers)
        check_balanced(self.architecture, trainer.moe)
        check_recomputed(self.architecture, recompute=trainer.activation_checkpointing)
        self.transformer = self._description()
        self.model = self._build(self.transformer)
        self._watch_routers()
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
        self.gathering = TensorGather(self.boxes, self.peers)
        self._trained = [box for box in self.boxes if not is_router_bias(box.tensor)]
        owned = [box for box in self.gathering.owned() if not is_router_bias(box.tensor)]
        self.optimizer = optimizer(self.ddp, trainer.optimizer, owned)
        a = self.architecture
        self._planner = MicrobatchPlanner(
            microbatch_tokens(trainer),
            trainer.shared_prompt,
            ratio_tokens=a.layer_weights / (2 * a.hidden),
            vocabulary=a.vocabulary,
            picture_rules=a.picture_rules,
        )
        self.initial_digest = self.weights_digest()

    # --- log-probabilities -----------------------------------------------------------------------

    def _logprobs(
        self, name: str, count: int, microbatches: Sequence[PackedRows], temperature: float
    ) -> NDArray[np.float32]:
        """Compute log-probabilities like the base class; equal on all ranks of a replica."""
        forward = self._forward if name == POLICY_LOGPROBS else self._reference
        values = torch.zeros(count, dtype=torch.float32, device=self._device)

        def keep(packed: PackedRows, logprobs_N: Tensor, _: Tensor) -> Tensor:
            source_N = torch.from_numpy(packed.source_N).to(self._device)
            values[source_N] = logprobs_N.float()
            return logprobs_N.sum()

        with self._no_message_unread():
            forward.run(microbatches, keep, temperature, backward=False)
        if self.layout.grid.pipeline > 1:
            last = dist.get_process_group_ranks(pipeline_group())[-1]
            dist.broadcast(values, src=last, group=pipeline_group())
        return values.cpu().numpy()

    @property
    def vocabulary(self) -> int:
        return self.architecture.vocabulary

    @property
    def picture_rules(self) -> PictureRules | None:
        return self.architecture.picture_rules

    @torch.no_grad()
    def top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        canaries = canary_rows(prompts, self.picture_rules)
        (rows,) = aligned([canaries], self.transformer, self.layout)
        with self._no_message_unread():
            logits_PV = self._forward.logits(rows)
        kept = None if logits_PV is None else largest_logprobs(logits_PV, count)
        gathered = self.peers.all_gather(
            kept, _KEPT
        )  # the first rank need not be on the last stage
        return next(each for each in gathered if each is not None)

    # --- weights in and out ----------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the whole model; tied ones count once."""
        shapes = self.gathering.shapes.items()
        return sum(math.prod(shape) for name, shape in shapes if not is_router_bias(name))

    @property
    def local_weights(self) -> dict[str, Tensor]:
        """Return this rank's share of the weights, by the library's names."""
        return weights_of(self.model)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights in order of their Hugging Face names; tied ones once. All ranks call it."""
        return self.gathering.all_tensors(self.local_weights)

    def metas(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return name, shape and dtype of every weight, in the order of ``named_weights``."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [
            (name, shape, "float32" if is_router_bias(name) else dtype)
            for name, shape in self.gathering.shapes.items()
        ]

    def held_regions(self) -> list[TensorRegion]:
        """Return this rank's regions of the weights, in the memory that training updates."""
        weights = self.local_weights
        return [TensorRegion(box.tensor, box.region, view_of(weights, box)) for box in self.boxes]

    def save(self, directory: str | Path) -> None:
        """Write a Hugging Face directory with the model path's tokenizer; atomic. All ranks call it."""
        save_directory(
            self._weights_of_files(), Path(directory), self.model_path, self._dtype, self.peers
        )

    def _weights_of_files(self) -> Iterator[tuple[str, Tensor]]:
        return ((self._file_names.get(name, name), each) for name, each in self.named_weights())

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
        whole = {} if self.expert_load is None else {SHARES: self.expert_load.state()}
        save_share(directory, dist.get_rank(), owned, kinds, self.optimizer.steps, whole)

    def _load(self, directory: Path) -> None:
        with SavedShares(directory) as saved:
            saved.fill(WEIGHTS, self.local_weights, self.boxes)
            kinds = dict[str, dict[str, Tensor]]()
            for kind in self.optimizer.kinds(saved.steps):
                names = {box.parameter for box in self._trained}
                values = {name: self.optimizer.like(name) for name in names}
                saved.fill(kind, values, self._trained)
                kinds[kind] = values
            self.optimizer.load(kinds, saved.steps)
            if self.expert_load is not None:
                self.expert_load.state().copy_(saved.whole(SHARES))

    def _initialise(self) -> None:
        load_boxes(self.local_weights, self.boxes, self.model_path, self._file_names)
        self.optimizer.reset()
        if self.expert_load is not None:
            self.expert_load.reset()

    # --- the step --------------------------------------------------------------------------------

    def _begin_gradients(self) -> None:
        self.gradients.begin()

    def _add_gradients(
        self, microbatches: Sequence[PackedRows], loss_of: LossOf, temperature: float
    ) -> None:
        with self._no_message_unread():
            self.gradients.accumulate(
                lambda: self._forward.run(microbatches, loss_of, temperature, backward=True)
            )

    def _router_biases(self) -> list[tuple[int, Tensor]]:
        biases = ((index, router.expert_bias) for index, router in self._routers())
        return [(index, bias) for index, bias in biases if bias is not None]

    @property
    def _is_replica_leader(self) -> bool:
        return self.layout.is_replica_leader

    def _apply(self, denominator: float, rate: float) -> UpdateResult:
        self.gradients.reduce(denominator)
        norm = self.optimizer.grad_norm()
        if not math.isfinite(norm):
            return UpdateResult(applied=False, grad_norm=norm)
        return UpdateResult(applied=True, grad_norm=norm, movement=self.optimizer.step(norm, rate))

    def _discard_gradients(self) -> None:
        """Restore the hooks and discard the gradients. Idempotent."""
        self.gradients.restore()
        self.gradients.zero()

    def _prepared_on_all_ranks(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        what, own = run_on_all_ranks(self.peers, during, read)
        return what, aligned(own, self.transformer, self.layout)

    @contextmanager
    def _no_message_unread(self) -> Generator[None]:
        """Declare the world broken if a pipeline stage fails: unread messages would be read later.

        Raises:
            WorldBroken: An error was raised in the block, with several pipeline stages.
        """
        try:
            yield
        except Exception as error:
            if self.layout.grid.pipeline == 1:
                raise
            detail = f"{type(error).__name__}: {line_of(error)}"
            raise WorldBroken(self.peers.rank, "the pipeline", detail) from error

    # --- how it is put together --------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _watch_routers(self) -> None:
        """Let the routers of this stage count what they route, and have losses of their own."""
        a = self.architecture
        if not a.experts:
            return
        load = ExpertLoad(len(a.expert_layers), a.experts, self._config.moe, self._device)
        for index, router in self._routers():
            router.load = load.layer(index)
        self.expert_load = load

    def _routers(self) -> Iterator[tuple[int, ExpertRouter]]:
        """Yield the routers of this stage, with their index among all layers of experts."""
        here = self.layout.grid.layers_of(self.layout.pipeline_rank, self.architecture.layers)
        indices = [
            self.architecture.expert_layers.index(each)
            for each in here
            if each in self.architecture.expert_layers
        ]
        routers = [each for each in self.model.modules() if isinstance(each, ExpertRouter)]
        yield from zip(indices, routers, strict=True)

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
        if self.architecture.tower and self.layout.is_first_stage:
            attach_tower(model, self.model_path, self._dtype)
        load_boxes(weights_of(model), self._boxes_of(model), self.model_path, self._file_names)
        return model

    def _boxes_of(self, model: GPTModel) -> list[TensorBox]:
        shapes = {name: tuple(each.shape) for name, each in weights_of(model).items()}
        return boxes_of(shapes, self.architecture, self.layout)

    def _forward_of(self, wrapped: nn.Module, model: GPTModel) -> Forward:
        tower, rules = tower_of(model), self.picture_rules
        features_of = None if tower is None or rules is None else features_by(tower, rules)
        return Forward(wrapped, model, self.layout, self.architecture.vocabulary, features_of)

    @cached_property
    def _reference(self) -> Forward:
        model = self._build(self._description()).requires_grad_(requires_grad=False)
        self._check_initial(weights_digest(self.gathering.all_tensors(weights_of(model))))
        return self._forward_of(model, model)

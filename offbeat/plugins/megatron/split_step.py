"""Megatron trainer of one rank, with tensor, pipeline, context, data and expert parallelism.

A rank receives its data-parallel share of the groups; ranks of one replica receive the same.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# megatron-core has no types.

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar, Unpack

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.config.limits import microbatch_tokens
from offbeat.models.loading import check_files
from offbeat.plugins.megatron.architecture import (
    Architecture,
    check_balanced,
    check_recomputed,
    read_architecture,
)
from offbeat.plugins.megatron.boxed_trainer import BoxedTrainer
from offbeat.plugins.megatron.flops import architecture_flops
from offbeat.plugins.megatron.forward import Forward
from offbeat.plugins.megatron.freezing import freeze_weights, frozen_weights
from offbeat.plugins.megatron.gradients import Gradients
from offbeat.plugins.megatron.groups import layout_group, pipeline_group, start_groups
from offbeat.plugins.megatron.hf_files import load_boxes
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.mapping import TOWER, TensorBox, boxes_of
from offbeat.plugins.megatron.microbatches import aligned
from offbeat.plugins.megatron.model import (
    build_model,
    in_data_parallel,
    transformer_config,
    weights_of,
)
from offbeat.plugins.megatron.optimizer import MainGradAdamW, RankOptimizer
from offbeat.plugins.megatron.router import ExpertRouter
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.plugins.megatron.sharded_optimizer import ShardedAdamW
from offbeat.plugins.megatron.tower import FeatureSource, attach_tower, features_by, tower_of
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.batches.packing import PackedRows, canary_rows
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.expert_load import ExpertLoad
from offbeat.trainers.model_trainer import LossOf, RankOptions
from offbeat.trainers.movement import UpdateResult
from offbeat.trainers.ranks.peers import WorldBroken, line_of, run_on_all_ranks
from offbeat.trainers.torch.optimizer import is_applicable
from offbeat.trainers.weights import shared_digest
from offbeat.transfer_queue.schema import POLICY_LOGPROBS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BackendParts:
    """Parts that a trainer is assembled from; the defaults are those of production."""

    gradients: Callable[[DistributedDataParallel, TransformerConfig], Gradients] = Gradients
    optimizer: type[RankOptimizer] | None = None
    """None: ``optimizer_for`` chooses."""

    overlap_grad_reduce: bool = False


def optimizer_for(device: torch.device, dtype: torch.dtype) -> type[RankOptimizer]:
    """Return ``ShardedAdamW`` on CUDA, but for float64, which it does not support."""
    is_sharded = device.type == "cuda" and dtype != torch.float64
    return ShardedAdamW if is_sharded else MainGradAdamW


class MegatronTrainer(BoxedTrainer):
    """One rank's share of a model, its gradients and its optimizer."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        trainer: MegatronTrainerConfig,
        parts: BackendParts | None = None,
        **options: Unpack[RankOptions],
    ) -> None:
        """Create the process groups and load this rank's share.

        Args:
            model_path: Hugging Face directory with safetensors files. The KL penalty pulls towards
                this model.
            trainer: Parallel sizes, packing and optimizer.
            parts: Replacements of the default parts.
            options: The model and the world of ranks.

        Raises:
            UntrainableModel: This kind of model has no mapping here, or not all that ``trainer.freeze``
                matches is of its vision tower.
            WeightsMismatch: The files are not those of their config's model.
            UnsupportedLayout: The model or the world cannot be partitioned like this.
        """
        super().__init__(model_path, trainer.optimizer, **options)
        self._config, self._parts = trainer, parts or BackendParts()
        self._enter_layout()
        self._load_share()
        self._train_share()
        a = self.architecture
        self._planner = MicrobatchPlanner(
            microbatch_tokens(trainer),
            trainer.shared_prompt,
            ratio_tokens=a.layer_weights / (2 * a.hidden),
            vocabulary=a.vocabulary,
            media_rules=a.media_rules,
        )
        self.initial_digest = self.current_digest()

    # --- log-probabilities -----------------------------------------------------------------------

    def _logprobs(
        self, name: str, count: int, microbatches: Sequence[PackedRows], temperature: float
    ) -> NDArray[np.float32]:
        """Compute log-probabilities like the base class; equal on all ranks of a replica."""
        forward = self._model_of(name)
        values = torch.zeros(count, dtype=torch.float32, device=self._device)

        def keep(packed: PackedRows, logprobs_N: Tensor, _: Tensor) -> Tensor:
            source_N = torch.from_numpy(packed.source_N).to(self._device)
            values[source_N] = logprobs_N.float()
            return logprobs_N.sum()

        with self._no_message_unread():
            forward.run(microbatches, keep, temperature)
        if self.layout.grid.pipeline > 1:
            last = dist.get_process_group_ranks(pipeline_group())[-1]
            dist.broadcast(values, src=last, group=pipeline_group())
        return values.cpu().numpy()

    @torch.no_grad()
    def _top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        canaries = canary_rows(prompts, self.media_rules)
        (rows,) = aligned([canaries], self.transformer, self.layout)
        with self._no_message_unread():
            kept = self._forward.top_logprobs(rows, count)
        return self._of_last_stage(kept)

    def _model_of(self, name: str) -> Forward:
        return self._forward if name == POLICY_LOGPROBS else self._reference

    # --- weights in and out ----------------------------------------------------------------------

    @property
    def local_weights(self) -> dict[str, Tensor]:
        """Return this rank's share of the weights, by the library's names."""
        return weights_of(self.model)

    # --- the step --------------------------------------------------------------------------------

    def _begin_gradients(self) -> None:
        self.gradients.begin()

    def _add_gradients(
        self, microbatches: Sequence[PackedRows], loss_of: LossOf, temperature: float
    ) -> None:
        normalize = self._step.loss.config.normalize
        with self._no_message_unread():
            self.gradients.accumulate(
                lambda: self._forward.run(microbatches, loss_of, temperature, trains=normalize)
            )

    def _router_biases(self) -> list[tuple[int, Tensor]]:
        biases = ((index, router.expert_bias) for index, router in self._routers())
        return [(index, bias) for index, bias in biases if bias is not None]

    @property
    def _is_replica_leader(self) -> bool:
        return self.layout.is_replica_leader

    @property
    def _replica(self) -> int:
        return self.layout.data_rank

    def _apply(self, denominator: float, rate: float) -> UpdateResult:
        self.gradients.reduce(denominator)
        norm = self._whole_norm(self.optimizer.grad_norm(), denominator)
        if not is_applicable(norm, self._config.optimizer.max_grad_norm):
            return UpdateResult(applied=False, grad_norm=norm)
        return UpdateResult(applied=True, grad_norm=norm, movement=self.optimizer.step(norm, rate))

    def _whole_norm(self, norm: float, denominator: float) -> float:
        """Return the norm of all gradients from that of the ranks of the layout, on all ranks.

        ``denominator``: what the sums of gradients were divided by.
        """
        del denominator
        return norm

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

    def _enter_layout(self) -> None:
        """Read the sizes of the model, refuse what cannot be trained, and create the process groups."""
        self.architecture = self._read_architecture()
        self._flops = architecture_flops(self.architecture)
        self.frozen = frozen_weights(self.model_path, self._config.freeze)
        run_on_all_ranks(
            self.peers, "its start", lambda: self.is_first and check_files(self.model_path)
        )
        self.layout = self._start_groups()
        check_balanced(self.architecture, self._config.moe)
        recompute = self._config.activation_checkpointing
        check_recomputed(self.architecture, recompute=recompute)

    def _load_share(self) -> None:
        """Build this rank's share of the model and load its weights."""
        self.transformer = self._description()
        self.model = self._build(self.transformer)
        freeze_weights(self.model, {f"{TOWER}{name}" for name in self.frozen.names})
        self._watch_routers()

    def _train_share(self) -> None:
        """Wrap the share in gradient buffers, and make the optimizer over what this rank owns of it."""
        optimizer = self._parts.optimizer or optimizer_for(self._device, self._dtype)
        self.ddp = in_data_parallel(
            self.model,
            self.transformer,
            overlap=self._parts.overlap_grad_reduce,
            sharded=optimizer.sharded,
        )
        self._forward = self._forward_of(self.ddp, self.model)
        self.gradients = self._parts.gradients(self.ddp, self.transformer)
        self._meet(self._boxes_of(self.model))
        owned = [box for box in self.gathering.owned() if self._is_trained(box)]
        self.optimizer = self._optimizer_state = optimizer(self.ddp, self._config.optimizer, owned)

    def _read_architecture(self) -> Architecture:
        """Return the sizes of what the ranks of the layout hold."""
        return read_architecture(self.model_path)

    def _start_groups(self) -> ParallelLayout:
        """Create the process groups. All ranks of the world do so together."""
        return start_groups(self._config, self.peers)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _watch_routers(self) -> None:
        """Let the routers of this stage count what they route, and have losses of their own."""
        a = self.architecture
        if not a.experts:
            return
        layers, ranks = len(a.expert_layers), layout_group()
        load = ExpertLoad(layers, a.experts, self._config.moe, self._device, ranks)
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
        features_of = self._features_by(model)
        return Forward(wrapped, model, self.layout, self.architecture.vocabulary, features_of)

    def _features_by(self, model: GPTModel) -> FeatureSource | None:
        """Return the source of the features of media; None on a rank that embeds no tokens."""
        tower = tower_of(model)
        return None if tower is None else features_by(tower, self.media_rules)

    @cached_property
    def _reference(self) -> Forward:
        model = self._build(self._description()).requires_grad_(requires_grad=False)
        named = self.gathering.all_tensors(weights_of(model))
        self._check_initial(shared_digest(named, self.peers))
        return self._forward_of(model, model)

"""Megatron trainer of one rank, with tensor, pipeline, context, data and expert parallelism.

A rank receives its data-parallel share of the groups. Ranks of one replica receive the same groups.

Also chooses the megatron trainer of a rank, and the source of its weights.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# megatron-core has no types.

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import nn

from offbeat.config.base import of_kind
from offbeat.config.limits import microbatch_tokens
from offbeat.models.loading import check_files
from offbeat.models.media_rules import MediaRules
from offbeat.plugins.megatron.architecture import (
    Architecture,
    architecture_flops,
    check_balanced,
    check_recomputed,
    read_architecture,
)
from offbeat.plugins.megatron.boxed_state import BoxedState, file_names, is_trained
from offbeat.plugins.megatron.forward import Forward
from offbeat.plugins.megatron.freezing import FrozenWeights, freeze_weights, frozen_weights
from offbeat.plugins.megatron.gathering import TensorGather
from offbeat.plugins.megatron.gradients import Gradients
from offbeat.plugins.megatron.groups import layout_group, start_groups
from offbeat.plugins.megatron.hf_files import load_boxes
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.mapping import TOWER, TensorBox, make_boxes
from offbeat.plugins.megatron.model import (
    build_model,
    collect_weights,
    in_data_parallel,
    transformer_config,
)
from offbeat.plugins.megatron.optimizer import (
    BufferUpdates,
    MainGradAdamW,
    RankOptimizer,
    ShardedAdamW,
)
from offbeat.plugins.megatron.passes import MegatronPasses
from offbeat.plugins.megatron.router import ExpertRouter
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.plugins.megatron.tower import FeatureSource, attach_tower, features_by, find_tower
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.expert_load import ExpertLoad
from offbeat.trainers.model_trainer import ModelTrainer, RankOptions
from offbeat.trainers.parts import Passes, RankFacts, shared_digest
from offbeat.trainers.ranks.assembly import build_shards, build_source, in_steps, rank_options
from offbeat.trainers.ranks.peers import Peers, run_on_all_ranks
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.trainer_plugin import choose_trainer
from offbeat.weight_sync.transport import WeightSource


class ModelSide:
    """The side of a model that the ranks of a layout hold. By default, the whole model."""

    def __init__(
        self, trainer: MegatronTrainerConfig, peers: Peers, next_step: Callable[[], int]
    ) -> None:
        """Create the side. ``next_step`` returns the number of the next step, for sides that send it."""
        del next_step
        self.trainer, self.peers = trainer, peers

    def read_architecture(self, model_path: Path) -> Architecture:
        """Return the sizes of the model's part on the ranks of the layout."""
        return read_architecture(model_path)

    def start_groups(self, frozen: FrozenWeights) -> ParallelLayout:
        """Create the process groups. All ranks of the world must call it together."""
        del frozen
        return start_groups(self.trainer, self.peers)

    def meet(self, architecture: Architecture) -> None:
        """Prove the model with the other side, if any, once all ranks know their boxes."""

    def find_features(
        self, model: GPTModel, layout: ParallelLayout, rules: MediaRules
    ) -> FeatureSource | None:
        """Return the source of the features of media, or None on a rank that embeds no tokens."""
        del layout
        tower = find_tower(model)
        return None if tower is None else features_by(tower, rules)

    def whole_norm(self, norm: float, denominator: float) -> float:
        """Return the norm of all gradients from the norm of the layout's ranks, on all ranks.

        ``denominator``: the divisor of the sums of gradients.
        """
        del denominator
        return norm

    def wrap(self, passes: MegatronPasses) -> Passes[PackedRows]:
        """Return the passes that exchange data with the other side. Here they are unchanged."""
        return passes


@dataclass(frozen=True, slots=True)
class BackendParts:
    """Parts of a trainer. The defaults are for production."""

    gradients: Callable[[DistributedDataParallel, TransformerConfig], Gradients] = Gradients
    optimizer: type[RankOptimizer] | None = None
    """None: ``optimizer_for`` chooses."""

    overlap_grad_reduce: bool = False
    side: Callable[..., ModelSide] = ModelSide


def optimizer_for(device: torch.device, dtype: torch.dtype) -> type[RankOptimizer]:
    """Return ``ShardedAdamW`` on CUDA, except for float64, which it does not support."""
    is_sharded = device.type == "cuda" and dtype != torch.float64
    return ShardedAdamW if is_sharded else MainGradAdamW


class MegatronTrainer(ModelTrainer):
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
            UntrainableModel: This kind of model has no mapping here, or ``trainer.freeze`` matches
                weights outside its vision tower.
            WeightsMismatch: The files do not fit the model of their config.
            UnsupportedLayout: The model or the world cannot be partitioned like this.
        """
        super().__init__(model_path, trainer.optimizer, **options)
        self._config, self._parts = trainer, parts or BackendParts()
        self.side = self._parts.side(trainer, self.peers, lambda: self.steps_applied + 1)
        self._enter_layout()
        self._load_share()
        self._train_share()
        self.passes = self.side.wrap(self._make_passes())
        self.initial_digest = self.current_digest()

    # --- assembly --------------------------------------------------------------------------------

    def _enter_layout(self) -> None:
        """Read the sizes of the model, refuse what cannot be trained, and create the process groups."""
        self.architecture = self.side.read_architecture(self.model_path)
        self.frozen = frozen_weights(self.model_path, self._config.freeze)
        run_on_all_ranks(
            self.peers, "its start", lambda: self.is_first and check_files(self.model_path)
        )
        self.layout = self.side.start_groups(self.frozen)
        check_balanced(self.architecture, self._config.moe)
        recompute = self._config.activation_checkpointing
        check_recomputed(self.architecture, recompute=recompute)

    def _load_share(self) -> None:
        """Build this rank's share of the model and load its weights."""
        self.transformer = self._description()
        self._file_names = file_names(self.model_path, self.architecture)
        self.model = self._build(self.transformer)
        freeze_weights(self.model, {f"{TOWER}{name}" for name in self.frozen.names})
        self._watch_routers()

    def _train_share(self) -> None:
        """Wrap the share in gradient buffers. Create the optimizer of the boxes of this rank."""
        kind = self._parts.optimizer or optimizer_for(self._device, self._dtype)
        self.ddp = in_data_parallel(
            self.model,
            self.transformer,
            overlap=self._parts.overlap_grad_reduce,
            sharded=kind.sharded,
        )
        self._forward = self._make_forward(self.ddp, self.model)
        self.gradients = self._parts.gradients(self.ddp, self.transformer)
        self.gathering = TensorGather(self._make_boxes(self.model), self.peers)
        self.side.meet(self.architecture)
        owned = [box for box in self.gathering.list_owned() if is_trained(box, self.frozen)]
        config = self._config.optimizer
        self.optimizer = kind(self.ddp, config, owned)
        self.updates = BufferUpdates(self.gradients, self.optimizer, config, self.side.whole_norm)
        self.model_state = BoxedState(
            self.model_path,
            self._dtype,
            self.peers,
            self.architecture,
            self.frozen,
            self.gathering,
            self.optimizer,
            lambda: collect_weights(self.model),
            self._expert_load,
        )

    def _make_passes(self) -> MegatronPasses:
        a, layout = self.architecture, self.layout
        planner = MicrobatchPlanner(
            microbatch_tokens(self._config),
            self._config.shared_prompt,
            ratio_tokens=a.layer_weights / (2 * a.hidden),
            vocabulary=a.vocabulary,
            media_rules=a.media_rules,
        )
        facts = RankFacts(
            self._device,
            a.vocabulary,
            a.media_rules,
            replica=layout.data_rank,
            leads_replica=layout.is_replica_leader,
            expert_load=self._expert_load,
        )
        return MegatronPasses(
            facts,
            self.peers,
            planner,
            architecture_flops(a),
            self._forward,
            self.gradients,
            list(self._routers()),
            self._load_reference,
        )

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _watch_routers(self) -> None:
        """Let the routers of this stage count the tokens that they route, and attach losses."""
        a, self._expert_load = self.architecture, None
        if not a.experts:
            return
        layers, ranks = len(a.expert_layers), layout_group()
        load = ExpertLoad(layers, a.experts, self._config.moe, self._device, ranks)
        for index, router in self._routers():
            router.load = load.layer(index)
        self._expert_load = load

    def _routers(self) -> Iterator[tuple[int, ExpertRouter]]:
        """Yield the routers of this stage, with their index among all layers of experts."""
        here = self.layout.grid.list_layers(self.layout.pipeline_rank, self.architecture.layers)
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
        load_boxes(
            collect_weights(model), self._make_boxes(model), self.model_path, self._file_names
        )
        return model

    def _make_boxes(self, model: GPTModel) -> list[TensorBox]:
        shapes = {name: tuple(each.shape) for name, each in collect_weights(model).items()}
        return make_boxes(shapes, self.architecture, self.layout)

    def _make_forward(self, wrapped: nn.Module, model: GPTModel) -> Forward:
        features_of = self.side.find_features(model, self.layout, self.architecture.media_rules)
        return Forward(wrapped, model, self.layout, self.architecture.vocabulary, features_of)

    def _load_reference(self) -> Forward:
        model = self._build(self._description()).requires_grad_(requires_grad=False)
        named = self.gathering.all_tensors(collect_weights(model))
        self._check_initial(shared_digest(named, self.peers))
        return self._make_forward(model, model)


def make_megatron_rank(spec: TrainerSpec, peers: Peers) -> tuple[ModelTrainer, WeightSource]:
    """Create the trainer of a rank, and the source of its weights."""
    trainer = make_megatron_trainer(spec, peers)
    metas = list(trainer.model_state.metas())
    if shards := build_shards(spec, metas, trainer.held_regions, peers):
        return trainer, shards
    return trainer, build_source(spec, metas, trainer.iterate_weights)


def make_megatron_trainer(spec: TrainerSpec, peers: Peers) -> ModelTrainer:
    """Create the trainer of a rank. If the vision tower has separate ranks, it holds one side."""
    config = of_kind(MegatronTrainerConfig, spec.config.trainer)
    kind: Callable[..., ModelTrainer] = choose_trainer(spec.config, peers.rank, MegatronTrainer)
    return kind(spec.config.model.path, trainer=in_steps(spec, config), **rank_options(spec, peers))

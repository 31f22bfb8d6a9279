"""The torch trainer of one rank.

With several ranks, the model is sharded over them (``sharding``), and they compute every microbatch
together. Before each chunk they exchange the number of microbatches, and whether a rank failed.

The module builds a recipe's torch trainer from its parts, and the source of its weights. A plug-in
can replace parts. They define how the model is made, which weights are trained, how microbatches
are passed through the model, and which weights are saved.
"""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.config.base import of_kind
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.models.media_rules import media_rules
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.model_trainer import ModelTrainer, RankOptions
from offbeat.trainers.parts import Passes, TrainedWeights, shared_digest
from offbeat.trainers.ranks.assembly import (
    build_shards,
    build_source,
    in_steps,
    rank_options,
)
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.teacher import check_tokenizers
from offbeat.trainers.torch.flops import model_flops
from offbeat.trainers.torch.loading import ModelLoader
from offbeat.trainers.torch.model import (
    call_to_pair_ratio,
    identity,
    linear_to_pair_ratio,
    recompute_layers,
    vocabulary,
)
from offbeat.trainers.torch.optimizer import Optimizer
from offbeat.trainers.torch.passes import TorchPasses
from offbeat.trainers.torch.routing import check_routers
from offbeat.trainers.torch.sharding import Weights
from offbeat.trainers.torch.split_attention import register_split_attention
from offbeat.trainers.torch.state import TorchState
from offbeat.trainers.trainer_plugin import make_source, replace_parts
from offbeat.weight_sync.transport import WeightSource

Exported = tuple[Iterator[tuple[str, Tensor]], Callable[[Path], None]]
"""Weights to export, and a function that writes other files into the exported directory."""


class TrainedParameters(ABC):
    """Trained weights of a model: their names, their identity and their export.

    ``add_to`` is called for each model, ``identify`` and ``hold`` once, in this order.
    """

    def __init__(self, trainer: TorchTrainerConfig, model_path: Path, peers: Peers) -> None:
        """Store the arguments. The constructor loads nothing.

        Args:
            trainer: The section of the recipe.
            model_path: Hugging Face directory of the model.
            peers: The ranks of the world.
        """
        self.trainer, self.model_path, self.peers = trainer, model_path, peers

    @property
    def base(self) -> str:
        """Return the digest of the frozen model below the trained weights, or "" if there is none.

        All ranks must make the first call together.
        """
        return ""

    def add_to(self, model: PreTrainedModel) -> None:
        """Add trained weights to a model, which may have no memory yet. By default, add nothing.

        Raises:
            UntrainableModel: The model does not support additions.
        """
        del model

    @abstractmethod
    def identify(self, model: PreTrainedModel) -> Identity:
        """Return the identity of the state, equal for any number of ranks.

        All ranks must call it.
        """

    @abstractmethod
    def hold(self, model: PreTrainedModel, every: Weights) -> None:
        """Find the weights in a model, which is sharded if there are several ranks.

        Args:
            model: The trained model.
            every: All weights of this model.
        """

    @property
    @abstractmethod
    def weights(self) -> TrainedWeights:
        """Return the trained weights."""

    @abstractmethod
    def export(self) -> Exported:
        """Return the exported weights, and a function that writes other files next to them."""

    def restore(self) -> bool:
        """Restore the initial weights if that needs no files. Return whether they are restored."""
        return False

    def proving(self) -> AbstractContextManager[None]:
        """Return a context in which no weight's gradient is zero because another weight is zero."""
        return nullcontext()

    def as_served(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes as engines do, without gradients."""
        return nullcontext()

    def as_base(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes as the frozen model does."""
        return nullcontext()


class WholeModel(TrainedParameters):
    """All weights of a model except the ones that ``trainer.freeze`` names."""

    def identify(self, model: PreTrainedModel) -> Identity:
        return identity(model)

    def hold(self, model: PreTrainedModel, every: Weights) -> None:
        del model
        self._every = every

    @property
    def weights(self) -> TrainedWeights:
        """Return the weights under their Hugging Face names."""
        return self._every

    def export(self) -> Exported:
        return self._every.iterate(), lambda _: None


def keep_passes(passes: TorchPasses, _: ModelLoader, __: Callable[[], int]) -> TorchPasses:
    """Return the passes unchanged."""
    return passes


@dataclass(frozen=True, slots=True)
class TorchParts:
    """Parts that a torch trainer is assembled from. A plug-in can replace some of them."""

    loader: Callable[..., ModelLoader] = ModelLoader
    trained: Callable[[TorchTrainerConfig, Path, Peers], TrainedParameters] = WholeModel
    state: Callable[..., TorchState] = TorchState
    passes: Callable[[TorchPasses, ModelLoader, Callable[[], int]], Passes[Any]] = keep_passes
    """(passes, loader of their model, number of the next step) -> passes that wrap them."""


class TorchTrainer(ModelTrainer):
    """Trainer of one model with one optimizer, from the parts in ``TorchParts``."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        trainer: TorchTrainerConfig,
        max_model_len: int,
        parts: TorchParts | None = None,
        **options: Unpack[RankOptions],
    ) -> None:
        """Load the model, and shard it if there are several ranks.

        Args:
            model_path: Hugging Face directory. Its model is the reference of the KL penalty.
            trainer: Device, packing, and optimizer. The caller sets the number of threads.
            max_model_len: Tokens of the longest sequence of the run.
            parts: Parts that differ from the default parts.
            options: The model and the world of ranks.

        Raises:
            UntrainableModel: Packed rows of the model are not exact, or the model does not support
                several ranks or the configured ``trainer.activation_checkpointing``.
        """
        super().__init__(model_path, trainer.optimizer, **options)
        torch.manual_seed(self._seed)
        register_split_attention()
        self._config, parts = trainer, parts or TorchParts()
        self.trained = parts.trained(trainer, self.model_path, self.peers)
        loader = parts.loader(
            self.model_path,
            trainer,
            options["model"],
            max_model_len=max_model_len,
            seed=self._seed,
            peers=self.peers,
            trained=self.trained,
        )
        whole = loader.read("its start")
        rows, witness = loader.prove(whole)
        self._model = model = loader.make(whole)
        if trainer.activation_checkpointing:
            recompute_layers(model)
        planner = MicrobatchPlanner(
            trainer.max_tokens_per_microbatch,
            rows.shared_prompt,
            linear_to_pair_ratio(model),
            vocabulary(model),
            call_pairs=call_to_pair_ratio(model) if rows.split else None,
            media_rules=media_rules(model.config),
        )
        flops = model_flops(model)
        check_routers(model, trainer.moe)
        identity = self.trained.identify(model)
        every = loader.shard(model, whole)
        del whole
        self.trained.hold(model, every)
        self.own_passes = TorchPasses(
            model,
            loader,
            planner,
            flops,
            trainer,
            plain_head=rows.plain_head,
            check_reference=self._check_initial,
        )
        if self.peers.size > 1:
            loader.prove_shards(model, witness)
        self.updates = optimizer = Optimizer(model, trainer.optimizer, self.peers, loader.axes)
        load = self.own_passes.facts.expert_load
        self.model_state = parts.state(
            model, every, loader, optimizer, identity, seed=self._seed, expert_load=load
        )
        self.passes = parts.passes(self.own_passes, loader, lambda: self.steps_applied + 1)
        # Only the base, if any: checkpoints of other additions refuse a resume themselves
        self.initial_digest = self.trained.base or self.current_digest()

    @property
    def module(self) -> PreTrainedModel:
        """Return the trained model. Its tensors keep their identity."""
        return self._model

    @property
    def weights(self) -> TrainedWeights:
        """Return the trained weights."""
        return self.trained.weights

    @property
    def shares_prompts(self) -> bool:
        """Return whether samples of a group share one copy of their prompt in a row."""
        return self.own_passes.planner.shared_prompt

    def weights_digest(self) -> str:
        """Compute one digest over the trained weights and their base.

        All ranks must call it together.
        """
        return shared_digest(self.iterate_weights(), self.peers, self.trained.base)

    def _check_initial(self, digest: str) -> None:
        if not self.trained.base:  # the base is frozen, so a reset reads no file
            super()._check_initial(digest)


def make_torch_rank(spec: TrainerSpec, peers: Peers) -> tuple[TorchTrainer, WeightSource]:
    """Create the trainer of a rank and the source of its weights."""
    if teacher := spec.config.algorithm.loss.teacher_path:
        check_tokenizers(teacher, spec.config.model.path)  # now, not before the first step
    trainer = build_torch_trainer(spec, peers)
    if source := make_source(spec, trainer):
        return trainer, source
    metas = list(trainer.model_state.metas())
    if shards := build_shards(spec, metas, trainer.held_regions, peers):
        return trainer, shards
    return trainer, build_source(spec, metas, trainer.iterate_weights)


def build_torch_trainer(spec: TrainerSpec, peers: Peers) -> TorchTrainer:
    """Build the trainer of one rank. Plug-ins may replace parts."""
    config = of_kind(TorchTrainerConfig, spec.config.trainer)
    return TorchTrainer(
        spec.config.model.path,
        trainer=in_steps(spec, config),
        max_model_len=spec.config.generator.max_model_len,
        parts=replace_parts(spec.config, peers.rank, TorchParts()),
        **rank_options(spec, peers),
    )

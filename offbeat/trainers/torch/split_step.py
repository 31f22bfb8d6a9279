"""The torch trainer of one rank.

With several ranks the model is sharded over them (``sharding``), and they compute every microbatch
together; before each chunk they exchange the number of microbatches, and whether a rank has failed.
"""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from pathlib import Path
from typing import Unpack

import torch
from transformers import PreTrainedModel

from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.models.media_rules import media_rules
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.model_trainer import ModelTrainer, RankOptions
from offbeat.trainers.torch.flops import model_flops
from offbeat.trainers.torch.model import (
    call_to_pair_ratio,
    linear_to_pair_ratio,
    vocabulary,
)
from offbeat.trainers.torch.optimizer import Optimizer
from offbeat.trainers.torch.parts import TorchParts
from offbeat.trainers.torch.passes import TorchPasses
from offbeat.trainers.torch.recompute import recompute_layers
from offbeat.trainers.torch.routing import check_routers
from offbeat.trainers.torch.split_attention import register_split_attention
from offbeat.trainers.weights import TrainedWeights, shared_digest


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
            model_path: Hugging Face directory. The KL penalty pulls towards this model.
            trainer: Device, packing, and optimizer. The caller sets the number of threads.
            max_model_len: Tokens of the longest sequence of the run.
            parts: Parts that differ from the default ones.
            options: The model and the world of ranks.

        Raises:
            UntrainableModel: Packed rows of the model are not exact, or it does not support
                ``trainer.activation_checkpointing`` or several ranks where they are set.
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
        # With a base alone: a resume with other additions is refused by their checkpoint, which says so.
        self.initial_digest = self.trained.base or self.current_digest()

    @property
    def module(self) -> PreTrainedModel:
        """Return the model being trained; its tensors keep their identity."""
        return self._model

    @property
    def weights(self) -> TrainedWeights:
        """Return the weights that are trained."""
        return self.trained.weights

    @property
    def shares_prompts(self) -> bool:
        """Return whether samples of a group share one copy of their prompt in a row."""
        return self.own_passes.planner.shared_prompt

    def weights_digest(self) -> str:
        """Compute one digest over the trained weights, and their base. All ranks call it together."""
        return shared_digest(self.named_weights(), self.peers, self.trained.base)

    def _check_initial(self, digest: str) -> None:
        if not self.trained.base:  # which is frozen: a reset reads no file
            super()._check_initial(digest)

"""Trainers that balance, route, place or cut layers as other systems do: wrongly, one mistake each."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from offbeat.plugins.megatron.hf_files import hf_weights, view_box
from offbeat.plugins.megatron.layout import ParallelLayout
from offbeat.plugins.megatron.mapping import make_boxes
from offbeat.plugins.megatron.megatron_trainer import MegatronTrainer
from offbeat.plugins.megatron.model import collect_weights
from offbeat.plugins.megatron.router import ExpertRouter
from offbeat.trainers.expert_load import RouterLoad
from offbeat.weight_sync.grid import ModelGrid

# --- the losses of routers ---------------------------------------------------------------------------


class BalancesOtherwise(MegatronTrainer):
    """Counts the load of experts, and computes losses from it, by ``Load``."""

    Load: type[RouterLoad]

    def _watch_routers(self) -> None:
        super()._watch_routers()
        for module in self.model.modules():
            if isinstance(module, ExpertRouter) and module.load is not None:
                module.load.__class__ = self.Load


class OwnFractions(BalancesOtherwise):
    """The load balancing loss reads the shares of the experts in its own microbatch."""

    class Load(RouterLoad):
        def count(
            self, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor, weight_T: Tensor
        ) -> None:
            before_E = self._tokens_E.clone()
            super().count(logits_TE, scores_TE, chosen_TK, weight_T)
            tokens_E = self._tokens_E - before_E
            self._shares_E = tokens_E / tokens_E.sum().clamp(min=1)


class LossPerRank(BalancesOtherwise):
    """Losses of routers are divided by the ranks that share a row's tokens, which are summed as well."""

    class Load(RouterLoad):
        ranks = 1

        def with_losses(
            self, weights: Tensor, logits_TE: Tensor, scores_TE: Tensor, weight_T: Tensor
        ) -> Tensor:
            return super().with_losses(weights, logits_TE, scores_TE, weight_T / self.ranks)

    def _watch_routers(self) -> None:
        self.Load.ranks = self.layout.grid.tensor * self.layout.grid.context
        super()._watch_routers()


class PaddingCounted(BalancesOtherwise):
    """Losses of routers are sums over all places of a row, prompts and padding among them."""

    class Load(RouterLoad):
        def with_losses(
            self, weights: Tensor, logits_TE: Tensor, scores_TE: Tensor, weight_T: Tensor
        ) -> Tensor:
            return super().with_losses(weights, logits_TE, scores_TE, torch.ones_like(weight_T))


# --- routing -----------------------------------------------------------------------------------------


class RoutesOtherwise(MegatronTrainer):
    """Chooses and weighs the experts of a token by ``Router``."""

    Router: type[ExpertRouter]

    def _build(self, config: Any) -> Any:
        model = super()._build(config)
        for module in model.modules():
            if isinstance(module, ExpertRouter):
                module.__class__ = self.Router
        return model


class OneScorePerGroup(RoutesOtherwise):
    """A group of experts is as good as its best expert, and not as its best two."""

    class Router(ExpertRouter):
        def _chosen(self, scores_TE: Tensor) -> Tensor:
            a = self._architecture
            assert self.expert_bias is not None
            biased_TGE = (scores_TE + self.expert_bias).unflatten(-1, (a.routing_groups, -1))
            best_TG = biased_TGE.amax(-1).topk(a.routing_groups_per_token, dim=-1).indices
            among_TG = torch.zeros_like(biased_TGE[..., 0], dtype=torch.bool)
            others_TG1 = ~among_TG.scatter(1, best_TG, value=True)[..., None]
            kept_TE = biased_TGE.masked_fill(others_TG1, -torch.inf).flatten(1)
            return kept_TE.topk(a.experts_per_token, dim=-1).indices


class BiasInWeights(RoutesOtherwise):
    """The weights of a token's experts are those of the biased scores by which they were chosen."""

    class Router(ExpertRouter):
        def _scores(self, logits_TE: Tensor) -> Tensor:
            assert self.expert_bias is not None
            return super()._scores(logits_TE) + self.expert_bias

        def _chosen(self, scores_TE: Tensor) -> Tensor:
            assert self.expert_bias is not None
            return super()._chosen(scores_TE - self.expert_bias)


class BiasForgotten(MegatronTrainer):
    """The bias stays zero, as the library makes it."""

    def _build(self, config: Any) -> Any:
        model = super()._build(config)
        for name, each in model.named_buffers():
            if name.endswith("expert_bias"):
                each.zero_()
        return model


# --- places of tokens and weights ----------------------------------------------------------------------


class LibraryRope(MegatronTrainer):
    """Scaled positions as the library has them: for a model of 8,192 positions, whatever the config says."""

    def _build(self, config: Any) -> Any:
        model = super()._build(config)
        a = self.architecture
        library = RotaryEmbedding(
            a.head_dim,
            rotary_percent=1.0,
            rotary_base=int(a.rope_theta),
            rope_scaling=True,
            use_cpu_initialization=True,
            cp_group=model.pg_collection.cp,
        )
        model.rotary_pos_emb.inv_freq = library.inv_freq
        return model


class EvenStages(MegatronTrainer):
    """A stage reads its layers from where it would begin if all stages had as many."""

    class Grid(ModelGrid):
        def list_layers(self, stage: int, layers: int) -> range:
            first = stage * layers // self.pipeline
            return range(first, first + len(super().list_layers(stage, layers)))

    def _build(self, config: Any) -> Any:
        model = super()._build(config)
        sizes = {each.name: getattr(self.layout.grid, each.name) for each in fields(ModelGrid)}
        read_again(self, model, replace(self.layout, grid=self.Grid(**sizes)), "decoder.layers.")
        return model


class SharedAsExperts(MegatronTrainer):
    """The part of a shared expert is that of the expert-tensor rank, as of an expert that is chosen."""

    def _build(self, config: Any) -> Any:
        model = super()._build(config)
        first = self.layout.rank - self.layout.tensor_rank
        read_again(self, model, replace(self.layout, rank=first), ".shared_experts.linear")
        return model


def read_again(
    trainer: MegatronTrainer, model: GPTModel, layout: ParallelLayout, within: str
) -> None:
    """Fill parameters whose names have ``within`` with what they would hold under another layout."""
    weights: Mapping[str, Tensor] = collect_weights(model)
    shapes = {name: tuple(each.shape) for name, each in weights.items() if within in name}
    with hf_weights(trainer.model_path) as files:
        for box in make_boxes(shapes, trainer.architecture, layout):
            view_box(weights, box).copy_(files.read(box))


MODEL_BUGS: dict[str, type[MegatronTrainer]] = {
    each.__name__: each
    for each in (
        OwnFractions,
        LossPerRank,
        PaddingCounted,
        OneScorePerGroup,
        BiasInWeights,
        BiasForgotten,
        LibraryRope,
        EvenStages,
        SharedAsExperts,
    )
}

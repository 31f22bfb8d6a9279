"""Router of a layer of experts, which scores and chooses like the routers of transformers.

The library's router rounds scores of any dtype to float32, sums a different number of experts per
group, and always normalises sigmoid scores. It updates its bias before a step is known to be
applied.

Legend: T tokens of this rank, E experts, K experts per token, G groups of experts.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# megatron-core has no types.

from typing import Any, Final, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import Router
from torch import Tensor, nn
from torch.nn import functional

from offbeat.plugins.megatron.architecture import Architecture
from offbeat.trainers.expert_load import RouterLoad

_SCORED_IN_A_GROUP: Final = 2  # experts that make up the score of their group
_NO_ZERO: Final = 1e-20  # transformers adds it to the sum of sigmoid scores


class ExpertRouter(Router):
    """Router by softmax or sigmoid scores. With sigmoids, a bias is added to choose experts."""

    expert_bias: Tensor | None  # [E] float32

    def __init__(
        self,
        architecture: Architecture,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        **options: Any,  # noqa: ANN401 -- of a newer library, for its base class
    ) -> None:
        super().__init__(config, pg_collection, **options)
        self._architecture = architecture
        self.load: RouterLoad | None = None
        """Counts and losses of this router while a step is trained. None: it only routes."""
        self.weight_T: Tensor | None = None
        """Weights of the pass's tokens in its losses. None: nothing is trained."""
        bias = None
        if architecture.sigmoid_routing:
            device = torch.cuda.current_device()
            bias = torch.zeros(architecture.experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias)

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: A002 -- its name in the library
        """Return weights [T, E], zero for experts that are not chosen, and the chosen ones [T, E].

        ``padding_mask`` is the library's rounded copy of ``weight_T``, and is not read.
        """
        del padding_mask
        # The library's ``gating`` needs a name of Transformer Engine, which may not be installed.
        dtype = torch.float32 if self.config.moe_router_dtype == "fp32" else input.dtype
        return self.routing(functional.linear(input.to(dtype), self.weight.to(dtype)))

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and chosen experts of tokens with these logits [..., E]."""
        a = self._architecture
        logits_TE = logits.view(-1, a.experts)
        scores_TE = self._scores(logits_TE)
        chosen_TK = self._chosen(scores_TE.detach())
        weights_TK = scores_TE.gather(1, chosen_TK)
        if a.normalise_routing:
            least = _NO_ZERO if a.sigmoid_routing else 0.0
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + least)
        weights_TK = (weights_TK * a.routing_scale).type_as(logits)
        # Layers that are computed again in the backward pass have no gradients in the first pass.
        weight_T = self.weight_T
        if self.load is not None and weight_T is not None and torch.is_grad_enabled():
            if a.sigmoid_routing:
                scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
            self.load.count(logits_TE, scores_TE, chosen_TK, weight_T)
            weights_TK = self.load.with_losses(weights_TK, logits_TE, scores_TE, weight_T)
        weights_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TK, weights_TK)
        chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, chosen_TK, value=True)
        return weights_TE, chosen_TE

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores [T, E] in float32, or in float64 for float64 logits."""
        wide_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
        return wide_TE.sigmoid() if self._architecture.sigmoid_routing else wide_TE.softmax(-1)

    def _chosen(self, scores_TE: Tensor) -> Tensor:
        """Return the indices [T, K] of the experts of each token."""
        a = self._architecture
        if self.expert_bias is not None:
            scores_TE = scores_TE + self.expert_bias
        if a.routing_groups > 1:
            scores_TGE = scores_TE.unflatten(-1, (a.routing_groups, -1))
            scores_TG = scores_TGE.topk(_SCORED_IN_A_GROUP, dim=-1).values.sum(-1)
            best_TG = scores_TG.topk(a.routing_groups_per_token, dim=-1).indices
            others_TG = torch.ones_like(scores_TG, dtype=torch.bool).scatter(
                1, best_TG, value=False
            )
            scores_TE = scores_TGE.masked_fill(others_TG[..., None], -torch.inf).flatten(1)
        return scores_TE.topk(a.experts_per_token, dim=-1).indices


def weigh_tokens(model: nn.Module) -> None:
    """Let each layer of experts pass its router the tokens' weights before they become a mask.

    A layer that is recomputed in the backward pass gets the weights of its own microbatch again.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.register_forward_pre_hook(_give_weights, with_kwargs=True)


def _give_weights(
    layer: nn.Module, inputs: tuple[object, ...], keywords: dict[str, Tensor | None]
) -> None:
    del inputs
    weight_RO = keywords.get("padding_mask")
    router = cast("ExpertRouter", layer.router)
    # Hidden states, and so logits, have tokens before rows.
    router.weight_T = None if weight_RO is None else weight_RO.T.reshape(-1)

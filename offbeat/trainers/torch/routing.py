"""Routers of a transformers model: load of their experts, and losses of the routers.

In transformers, a router is a separate module. For each token it returns logits, weights and the
chosen experts.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Final

from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.config.sections.loss import Normalize
from offbeat.config.sections.moe import MoeConfig
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.expert_load import ExpertLoad, RouterLoad, loss_weights, normalise_scores

BIAS: Final = "e_score_correction_bias"
_HAS_SIGMOID_SCORES: Final = {
    "MixtralTopKRouter": False,
    "OlmoeTopKRouter": False,
    "Qwen2MoeTopKRouter": False,
    "Qwen3MoeTopKRouter": False,
    "Qwen3VLMoeTextTopKRouter": False,
    "DeepseekV3TopkRouter": True,
    "Dots1TopkRouter": True,
    "Glm4MoeTopkRouter": True,
}
"""Router classes, and whether their scores are sigmoids, not a softmax over all experts."""


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model, in layer order. Empty for unknown families."""
    return [each for each in model.modules() if type(each).__name__ in _HAS_SIGMOID_SCORES]


def check_routers(model: nn.Module, config: MoeConfig) -> None:
    """Refuse settings of ``trainer.moe`` that would have no effect on this model.

    Raises:
        UntrainableModel: The model has no router, no trained router, or a router without the bias
            that should be updated.
    """
    routers, name = find_routers(model), type(model).__name__
    balances = config.has_losses or config.bias_update_rate > 0
    if balances and routers and not any(map(_is_trained, routers)):
        problem = "has no router for trainer.moe to balance: trainer.freeze matches all of them"
        raise UntrainableModel(name, problem, "Leave trainer.moe out, or a pattern")
    if balances and not routers:
        known = ", ".join(_HAS_SIGMOID_SCORES)
        problem = f"has no router that trainer.moe knows, which are {known}"
        raise UntrainableModel(name, problem, "Leave trainer.moe out")
    if config.bias_update_rate and not all(map(_has_bias, routers)):
        problem = "has routers without a bias, which trainer.moe.bias_update_rate would update"
        raise UntrainableModel(name, problem, "Set trainer.moe.load_balancing_coef instead")


def _is_trained(router: nn.Module) -> bool:
    return router.get_parameter("weight").requires_grad


def _has_bias(router: nn.Module) -> bool:
    return BIAS in dict(router.named_buffers(recurse=False))


class ModelRouting:
    """The routers of a model, watched while a microbatch is trained."""

    def __init__(self, model: PreTrainedModel, config: MoeConfig) -> None:
        """Hook the routers, if the model has any."""
        self.load: ExpertLoad | None = None
        self._routers = find_routers(model)
        self._weight_T: Tensor | None = None  # of the present microbatch
        self._is_first_pass = False
        if self._routers:
            experts = int(self._routers[0].get_parameter("weight").shape[0])
            self.load = ExpertLoad(len(self._routers), experts, config, model.device)
            for index, router in enumerate(self._routers):
                router.register_forward_hook(partial(self._watch, self.load.layer(index)))

    def biases(self) -> list[tuple[int, Tensor]]:
        """Return index and bias of each trained router with a bias. The bias has no gradient."""
        return [
            (index, router.get_buffer(BIAS))
            for index, router in enumerate(self._routers)
            if _has_bias(router) and _is_trained(router)
        ]

    @contextmanager
    def count_tokens(self, packed: PackedRows, normalize: Normalize) -> Generator[None]:
        """Count the tokens of a microbatch. Its forward and backward passes run in the block.

        ``normalize`` is the normalization of the policy loss. The routers' losses use the same
        token weights.
        """
        if self.load is not None:
            weight_RT = loss_weights(packed.sample_tokens_RT, normalize)
            self._weight_T = weight_RT.reshape(-1).to(self.load.state().device)
        self._is_first_pass = True
        try:
            yield
        finally:
            self._weight_T = None

    def forward_done(self) -> None:
        """Stop counting, because the backward pass may compute layers again."""
        self._is_first_pass = False

    def _watch(
        self, load: RouterLoad, router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._weight_T is None:
            return None
        logits, weights, chosen = output
        sigmoid = _HAS_SIGMOID_SCORES[type(router).__name__]
        scores_TE = normalise_scores(logits.reshape(-1, logits.shape[-1]), sigmoid=sigmoid)
        logits_TE = logits.reshape(scores_TE.shape)
        if self._is_first_pass:
            chosen_TK = chosen.reshape(len(scores_TE), -1)
            load.count(logits_TE, scores_TE, chosen_TK, self._weight_T)
        weights = load.with_losses(weights, logits_TE, scores_TE, self._weight_T)
        return logits, weights, chosen

"""Load of a model's experts: token counts of an open step, and balancing losses and biases.

A loss over the counts of a microbatch would depend on how a step is split and laid out. Here the
experts' shares are constant during a step: they come from the last applied step. So the loss is a
plain sum over tokens, like every other loss. Only response tokens are counted, because each occurs
once, however a step is packed. Padding and prompts may occur a different number of times, because
samples may share a prompt.

Legend: L layers with experts, E experts, K experts per token, T tokens.
"""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.config.sections.loss import Normalize
from offbeat.config.sections.moe import MoeConfig
from offbeat.trainers.batches.packing import Ints

SHARES: Final = "expert_shares"
"""Name of the state in checkpoints."""


def loss_weights(sample_tokens: Ints, normalize: Normalize) -> Tensor:
    """Return each token's weight in the router losses (the same as in the policy loss), in float64.

    Args:
        sample_tokens: ``PackedRows.sample_tokens_RT``, or a part of it, in any shape. Tokens that
            do not count are 0 there and in the result.
        normalize: The recipe's loss normalization. A trained token weighs 1, or 1 divided by the
            trained tokens of its sample.
    """
    tokens = torch.from_numpy(sample_tokens).double()
    if normalize == "sequences":
        return torch.where(tokens > 0, 1.0 / tokens.clamp(min=1.0), 0.0)
    return (tokens > 0).double()


class ExpertLoad:
    """Counts of all layers over one optimizer step, and the shares of the last applied step.

    Every rank has such an object and counts the tokens that it routes. Each token is counted on one
    rank.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        config: MoeConfig,
        device: torch.device | str,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """Start with equal shares.

        Args:
            layers: Number of layers with experts, in the whole model.
            experts: Number of experts per layer.
            config: Weights of the losses, and rate of the biases.
            device: Device where routers compute.
            ranks: Ranks that hold the model, or None for the whole world.
        """
        self.config, self._ranks = config, ranks
        self._shares_LE = torch.full(
            (layers, experts), 1 / experts, dtype=torch.float64, device=device
        )
        self._tokens_LE = torch.zeros_like(self._shares_LE)  # a token counts once per chosen expert
        self._sums_LM = self._shares_LE.new_zeros(layers, len(LoadSums._fields))
        self._metrics: dict[str, float] = {}

    def layer(self, index: int) -> "RouterLoad":
        """Return the part for one layer. It shares this object's memory."""
        rows = self._shares_LE[index], self._tokens_LE[index], self._sums_LM[index]
        return RouterLoad(self.config, *rows)

    def begin(self) -> None:
        """Begin an optimizer step. Discard counts of a step that was not applied."""
        self._tokens_LE.zero_()
        self._sums_LM.zero_()

    def apply(self, biases: Sequence[tuple[int, Tensor]]) -> None:
        """End an applied optimizer step: set shares and metrics, and update biases.

        All ranks must call it.

        Args:
            biases: Layer index and bias [E] of each router of this rank that has a bias.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._tokens_LE, group=self._ranks)
            dist.all_reduce(self._sums_LM, group=self._ranks)
        mean_L1 = self._tokens_LE.mean(-1, keepdim=True)
        is_counted_L = mean_L1[:, 0] > 0  # false in a step of one-token responses
        if bool(is_counted_L.all()):
            self._shares_LE.copy_(self._tokens_LE / self._tokens_LE.sum(-1, keepdim=True))
            self._metrics = self._measure(mean_L1)
        if self.config.bias_update_rate:
            with torch.no_grad():
                for index, bias_E in biases:
                    missing_E = (mean_L1[index] - self._tokens_LE[index]).sign()
                    bias_E.add_(self.config.bias_update_rate * missing_E.to(bias_E.dtype))
        self.begin()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the last applied optimizer step and clear them."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _measure(self, mean_L1: Tensor) -> dict[str, float]:
        largest_L = (self._tokens_LE / mean_L1).amax(-1)
        sums = LoadSums(*self._sums_LM.unbind(-1))
        return {
            "moe/load_max": float(largest_L.max()),
            "moe/load_max_mean": float(largest_L.mean()),
            "moe/router_entropy": float((sums.entropy / sums.tokens).mean()),
            "moe/idle_experts": float((self._tokens_LE == 0).double().mean()),
            "moe/load_balancing_loss": float((sums.balance / sums.weight).mean()),
            "moe/z_loss": float((sums.flatness / sums.weight).mean()),
        }

    # --- the state -------------------------------------------------------------------------------

    def state(self) -> Tensor:
        """Return the shares [L, E]: the tensor itself, with equal values on all ranks."""
        return self._shares_LE

    def reset(self) -> None:
        """Return to equal shares."""
        self.begin()
        self._shares_LE.fill_(1 / self._shares_LE.shape[-1])


class LoadSums(NamedTuple):
    """Sums over the tokens that routers counted. Each is one number, or one per layer [L]."""

    tokens: Tensor
    entropy: Tensor  # of the scores
    weight: Tensor  # ``loss_weights``
    balance: Tensor  # the losses without their coefficients, times the weights
    flatness: Tensor


class RouterLoad:
    """Counts and losses of one layer's router."""

    def __init__(
        self, config: MoeConfig, shares_E: Tensor, tokens_E: Tensor, sums_M: Tensor
    ) -> None:
        self._config, self._shares_E = config, shares_E
        self._tokens_E, self._sums_M = tokens_E, sums_M  # M: the fields of ``LoadSums``

    @torch.no_grad()
    def count(
        self, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor, weight_T: Tensor
    ) -> None:
        """Add the tokens of a microbatch, without reading from the device.

        Args:
            logits_TE: Logits of the experts.
            scores_TE: Scores of the experts, which add up to 1.
            chosen_TK: Indices of the experts of each token.
            weight_T: ``loss_weights``. Each token with a nonzero weight counts once.
        """
        wide_T = (weight_T > 0).to(self._tokens_E.dtype)
        each_TK = wide_T[:, None].expand_as(chosen_TK)
        self._tokens_E.scatter_add_(0, chosen_TK.reshape(-1), each_TK.reshape(-1))
        entropy_T = -torch.xlogy(scores_TE, scores_TE).sum(-1).to(wide_T.dtype)
        balance_T, flatness_T = self._balance(scores_TE), _flatness(logits_TE, scores_TE)
        sums = LoadSums(
            tokens=wide_T.sum(),
            entropy=(entropy_T * wide_T).sum(),
            weight=weight_T.sum(),
            balance=(balance_T * weight_T).sum(),
            flatness=(flatness_T * weight_T).sum(),
        )
        self._sums_M += torch.stack(sums)

    def with_losses(
        self, weights: Tensor, logits_TE: Tensor, scores_TE: Tensor, weight_T: Tensor
    ) -> Tensor:
        """Return the weights unchanged.

        Their backward pass adds the gradients of the router losses. These losses are sums over
        tokens, each multiplied by its weight from ``loss_weights``. The sums are divided at the end
        of the step, like all gradients.
        """
        balance, flatness = self._config.load_balancing_coef, self._config.z_loss_coef
        if not self._config.has_losses:
            return weights
        loss_T = balance * self._balance(scores_TE)
        if flatness:
            loss_T = loss_T + flatness * _flatness(logits_TE, scores_TE)
        return cast("Tensor", _AddedLoss.apply(weights, (loss_T * weight_T.to(loss_T.dtype)).sum()))

    def _balance(self, scores_TE: Tensor) -> Tensor:
        """Return the load balancing loss of each token [T], without its coefficient."""
        return len(self._shares_E) * (scores_TE @ self._shares_E.to(scores_TE.dtype))


def _flatness(logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
    """Return the z loss of each token [T] in the dtype of the scores, without its coefficient."""
    return logits_TE.to(scores_TE.dtype).logsumexp(-1).square()


def normalise_scores(logits_TE: Tensor, *, sigmoid: bool) -> Tensor:
    """Return expert scores that add up to 1, in float32, or float64 for float64 logits."""
    wide_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    if not sigmoid:
        return wide_TE.softmax(-1)
    scores_TE = wide_TE.sigmoid()
    return scores_TE / scores_TE.sum(-1, keepdim=True)


class _AddedLoss(torch.autograd.Function):
    """Returns values unchanged. When their gradient is computed, the loss gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:  # noqa: ANN401 -- torch's
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401 -- torch's
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)

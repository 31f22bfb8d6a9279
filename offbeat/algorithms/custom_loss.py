"""Implements ``custom``: a user's loss, a function that returns the loss of each token.

The function decides nothing else. Masks, off-policy weights, KL penalty, entropy bonus, divisor and
metrics are the same as for every policy-gradient loss (``losses``). So the result of a step does
not depend on chunks, microbatches or ranks, as long as the loss of a token depends only on its
sequence (``loss_proof``). Legend: N tokens, S sequences.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from offbeat.algorithms.corrections import correction
from offbeat.algorithms.losses import Surrogate, add_up, with_advantages
from offbeat.algorithms.tokens import LossSums, LossTokens, ValidTokens, token_mean
from offbeat.config.sections.loss import CustomLossConfig
from offbeat.config.user_code import describe
from offbeat.messages.failures import UserCodeRefused

METRICS: Final = "loss/"
"""Prefix of the metrics that the function names."""

_METRIC_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_FORMS: Final = "Return loss_N, or loss_N and a dict of named values, [N] each"
_PAIR: Final = 2


class LossRefused(UserCodeRefused):
    """The function of ``algorithm.loss.target`` cannot be used, or returns a wrong result.

    Fix: return a loss per token, as the message shows (docs/algorithms.md).
    """

    form = "algorithm.loss.target={}: {}. {}"


class TokenValues(NamedTuple):
    """Checked result of the user's function. All values are [N]."""

    loss_N: Tensor  # floating; carries the gradient
    shown_N: dict[str, Tensor]  # values to show as metrics, by name; without gradient


class CustomLoss:
    """``Loss`` that calls the user's function."""

    def __init__(
        self, function: Callable[..., Any], target: str, working_dir: Path | None = None
    ) -> None:
        """Store the function. It is not called yet.

        Args:
            function: Called with ``LossTokens`` and the options of the recipe.
            target: Name of the function in messages.
            working_dir: Where the user's modules are, to locate an error.
        """
        self._function, self.target, self._working_dir = function, target, working_dir

    def __call__(self, tokens: LossTokens, config: CustomLossConfig) -> LossSums:
        """Compute the sums of one microbatch.

        Raises:
            LossRefused: The function raised, or returned something other than the loss of each token.
        """
        valid = with_advantages(tokens, config)
        values = self.values(function_tokens(valid, tokens), config.options)
        surrogate = Surrogate(torch.where(valid.mask_N, values.loss_N, 0.0))
        sums = add_up(valid, surrogate, correction(valid, config), tokens, config)
        shown = {
            f"{METRICS}{name}": token_mean(values_N, valid.mask_N)
            for name, values_N in values.shown_N.items()
        }
        return replace(sums, metrics=sums.metrics | shown)

    def values(self, tokens: LossTokens, options: Mapping[str, Any]) -> TokenValues:
        """Return the function's values for these tokens.

        Raises:
            LossRefused: The function raised, or returned something else.
        """
        try:
            returned = self._function(tokens, options)
        except torch.OutOfMemoryError:
            raise  # an error of the device, not of the function
        except Exception as error:
            problem = f"it raised {describe(error, self._working_dir)}"
            raise LossRefused(self.target, problem, "Repair the function") from error
        return self._check_values(returned, len(tokens.mask_N))

    def _check_values(self, returned: object, count: int) -> TokenValues:
        loss_N, shown = returned, dict[object, object]()
        if isinstance(returned, tuple):
            pair = cast("tuple[object, ...]", returned)
            if len(pair) != _PAIR or not isinstance(pair[1], Mapping):
                kinds = ", ".join(_kind(each) for each in pair)
                raise LossRefused(self.target, f"it returned a tuple of ({kinds})", _FORMS)
            loss_N, shown = pair[0], dict(cast("Mapping[object, object]", pair[1]))
        loss_N = self._per_token("the loss", loss_N, count)
        if not loss_N.is_floating_point():
            raise LossRefused(self.target, f"the loss has dtype {loss_N.dtype}", _FORMS)
        shown_N = dict[str, Tensor]()
        for name, values in shown.items():
            if not isinstance(name, str) or not _METRIC_NAME.fullmatch(name):
                fix = "Name it with letters, digits, dots, dashes and underscores"
                raise LossRefused(self.target, f"a value is called {name!r}", fix)
            shown_N[name] = self._per_token(f"value {name!r}", values, count).detach()
        return TokenValues(loss_N, shown_N)

    def _per_token(self, what: str, value: object, count: int) -> Tensor:
        """Return the value as a Tensor, [N]. Refuse anything else."""
        if not isinstance(value, Tensor):
            raise LossRefused(self.target, f"{what} is {_kind(value)}, not a Tensor", _FORMS)
        if value.shape != (count,):
            problem = f"{what} has shape {list(value.shape)} for {count} tokens"
            fix = (
                "Return one number per token, [N], not a sum or mean: algorithm.loss.normalize "
                "sets the divisor of the step's sum"
            )
            raise LossRefused(self.target, problem, fix)
        return value


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor {list(value.shape)}"
    return "None" if value is None else f"of type {type(value).__name__}"


def function_tokens(valid: ValidTokens, tokens: LossTokens) -> LossTokens:
    """Return the tokens for the user's function: 0, never NaN, where a token is not trained."""
    staleness_N = tokens.staleness_N
    return LossTokens(
        logprobs_N=valid.logprobs_N,
        old_N=valid.old_N,
        generation_N=None if tokens.generation_N is None else valid.generation_N,
        reference_N=valid.reference_N,
        advantages_N=valid.advantages_N,
        mask_N=valid.mask_N,
        sequence_N=valid.sequence_N,
        sequences=tokens.sequences,
        staleness_N=None if staleness_N is None else torch.where(valid.mask_N, staleness_N, 0),
        teacher_N=valid.teacher_N,
        sample_share_S=tokens.sample_share_S,
        entropy_N=valid.entropy_N,
    )

"""AdamW over raw gradient sums: normalise, clip, check and step in one place.

Half-precision parameters get a float32 master each: gradients are added up and weights are updated
there, because a step of 1e-6 is lost in bfloat16's eight bits. The model keeps its type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.config.training import OptimizerConfig

State = dict[str, Any]
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Update:
    """What ``Optimizer.step`` did. The weights changed if and only if ``applied``."""

    applied: bool
    grad_norm: float  # after normalisation, before clipping


class Optimizer:
    """AdamW of the trainable parameters of a module. Weight decay is for matrices only."""

    def __init__(self, module: nn.Module, config: OptimizerConfig) -> None:
        self._config = config
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._masters = [_master(each) for each in self._parameters]
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(_adder(master))
        decayed = [each for each in self._masters if each.ndim > 1]
        others = [each for each in self._masters if each.ndim <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def step(self, denominator: float, learning_rate: float) -> Update:
        """Divide the summed gradients, clip them, update the weights and drop the gradients.

        With a gradient norm that is not finite, nothing but the gradients changes.
        """
        gradients = [each.grad for each in self._masters if each.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients)) / denominator if gradients else 0.0
        applied = norm < float("inf")  # False for NaN too
        if applied:
            limit = self._config.max_grad_norm
            clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
            torch._foreach_mul_(gradients, clip / denominator)  # pyright: ignore -- no public form
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self._write_back()
        self.drop_gradients()
        return Update(applied, norm)

    def drop_gradients(self) -> None:
        """Forget what was accumulated; weights and moments stay."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.grad = None
            master.grad = None

    @torch.no_grad()
    def reload_masters(self) -> None:
        """Take the module's weights over, after somebody else wrote them."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                master.copy_(parameter)

    def state(self) -> State:
        """Moments, and masters where there are any."""
        return {
            "adamw": self._adamw.state_dict(),
            "masters": [m.detach() for m in self._own_masters],
        }

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Take up a state made by ``state`` with the same parameters in the same order."""
        self._adamw.load_state_dict(state["adamw"])
        for master, saved in zip(self._own_masters, state["masters"], strict=True):
            master.copy_(saved)
        self._write_back()

    @property
    def _own_masters(self) -> list[Tensor]:
        pairs = zip(self._parameters, self._masters, strict=True)
        return [master for parameter, master in pairs if master is not parameter]

    @torch.no_grad()
    def _write_back(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype not in _HALF:
        return parameter
    return parameter.detach().float().requires_grad_()


def _adder(master: Tensor) -> Callable[[Tensor], None]:
    """Moves a parameter's gradient into its master as soon as backward has made it."""

    def add(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            wide = gradient.float()
            master.grad = wide if master.grad is None else master.grad.add_(wide)

    return add

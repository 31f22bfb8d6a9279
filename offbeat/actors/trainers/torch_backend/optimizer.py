"""AdamW over raw gradient sums: normalise, clip, check and step in one place.

Half-precision parameters get a float32 master each: gradients are added up and weights are updated
there, because a step of 1e-6 is lost in bfloat16's eight bits. The model keeps its type.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from offbeat.config.training import OptimizerConfig

_MASTER: Final = "master/"
_MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")
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
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._names, self._parameters = list(trained), list(trained.values())
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
    def reset(self) -> None:
        """Be as new, after somebody else wrote the module's weights."""
        self.drop_gradients()
        self._adamw.state.clear()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                master.copy_(parameter)

    def tensors(self) -> dict[str, Tensor]:
        """Moments, and masters where there are any, by what they are and the parameter's name."""
        tensors = dict[str, Tensor]()
        for name, parameter, master in self._named():
            if master is not parameter:
                tensors[f"{_MASTER}{name}"] = master.detach()
            for kind, value in self._adamw.state.get(master, {}).items():
                tensors[f"{kind}/{name}"] = value
        return tensors

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take up ``tensors`` of the same parameters; the module's weights are somebody else's business."""
        self.drop_gradients()
        self._adamw.state.clear()
        for name, parameter, master in self._named():
            if master is not parameter:
                master.copy_(saved[f"{_MASTER}{name}"])
            moments = {kind: saved.get(f"{kind}/{name}") for kind in _MOMENTS}
            for kind, value in moments.items():
                if value is not None:
                    self._adamw.state[master][kind] = value.to(master.device)

    @property
    def state_nbytes(self) -> int:
        """Of ``tensors`` once every parameter has moments."""
        own = sum(m.nbytes for _, p, m in self._named() if m is not p)
        return own + 2 * sum(each.nbytes for each in self._masters)

    def _named(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        return zip(self._names, self._parameters, self._masters, strict=True)

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

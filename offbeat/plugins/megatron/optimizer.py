"""AdamW over the library's gradient buffers: every rank updates its whole share of the model.

Half-precision parameters get a float32 master each. Moments are as large as this rank's share of
the model; ``sharded_optimizer`` has the same interface and needs less memory, on CUDA.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# megatron-core has no types.

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Final

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.models.plain import HALF
from offbeat.plugins.megatron.gradients import Gradients
from offbeat.plugins.megatron.groups import layout_group
from offbeat.plugins.megatron.hf_files import view_of
from offbeat.plugins.megatron.mapping import TensorBox
from offbeat.trainers.movement import Movement, MovementProbe, UpdateResult
from offbeat.trainers.torch.optimizer import adamw_of, is_applicable, sum_squares

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MASTER: Final = "master"


class RankState(ABC):
    """State of AdamW over a rank's trained parameters, by kind, then by the parameter's name.

    Its form is the same for all subclasses; its size is that of this rank's share.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """``dtype``: of the weights that passes compute with; 16 bits have masters in float32."""
        self.steps = 0  # updates since the state was new
        self._has_masters = dtype in HALF
        self._wide = max(torch.float32.itemsize, dtype.itemsize)

    @abstractmethod
    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return moments, and masters if there are any; all ranks call it."""

    @abstractmethod
    def load(self, kinds: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Load a ``state`` of the same parameters; the caller loads the weights."""

    @abstractmethod
    def reset(self) -> None:
        """Return to the initial state, after the caller wrote the weights."""

    @abstractmethod
    def like(self, name: str) -> Tensor:
        """Allocate one parameter's moment or master, filled with zeros."""

    def kinds(self, steps: int) -> tuple[str, ...]:
        """Return the kinds of a ``state`` after ``steps`` updates."""
        masters = (MASTER,) if self._has_masters else ()
        return (*MOMENTS, *masters) if steps else masters

    @property
    def bytes_a_weight(self) -> int:
        """Return the bytes of ``state`` per trained weight, once there are moments."""
        return self._wide * (len(MOMENTS) + self._has_masters)


class RankOptimizer(RankState):
    """AdamW of the trained part of one rank's share of a model. Weight decay applies to matrices only."""

    sharded: ClassVar[bool]
    """True if it needs gradients that are reduce-scattered over data-parallel ranks."""

    def __init__(
        self, ddp: DistributedDataParallel, config: OptimizerConfig, owned: Sequence[TensorBox]
    ) -> None:
        """Start without moments, from the current weights.

        Args:
            ddp: A module whose trained parameters have a ``main_grad`` each; it updates no others.
            config: Rates and bounds.
            owned: Boxes of them that this rank owns: every element is in one box of one rank.
        """
        self._config, self._owned = config, owned
        self._parameters: dict[str, nn.Parameter] = {
            name: each for name, each in ddp.module.named_parameters() if each.requires_grad
        }
        super().__init__(next(iter(self._parameters.values())).dtype)

    @abstractmethod
    def grad_norm(self) -> float:
        """Return the norm of the reduced gradients of all ranks of the layout, which all call it."""

    @abstractmethod
    def step(self, grad_norm: float, learning_rate: float) -> Movement:
        """Clip by this norm, which is finite, and update the weights; all ranks call it.

        Returns:
            Whether this rank's part of the float32 weights moved.
        """

    def like(self, name: str) -> Tensor:
        parameter = self._parameters[name].detach()
        dtype = torch.float32 if self._has_masters else parameter.dtype
        return torch.zeros_like(parameter, dtype=dtype)


class MainGradAdamW(RankOptimizer):
    """torch's AdamW on all of this rank's trained parameters."""

    sharded: ClassVar[bool] = False

    def __init__(
        self, ddp: DistributedDataParallel, config: OptimizerConfig, owned: Sequence[TensorBox]
    ) -> None:
        super().__init__(ddp, config, owned)
        self._masters: dict[str, Tensor] = {
            name: each.detach().float().requires_grad_() if self._has_masters else each
            for name, each in self._parameters.items()
        }
        self._adamw = adamw_of(self._masters.values(), config)

    def grad_norm(self) -> float:
        """Return the norm over owned boxes: replicas and tied embeddings count once."""
        gradients = {name: _gradient(each) for name, each in self._parameters.items()}
        device = next(iter(gradients.values())).device
        return norm_over_layout([view_of(gradients, box) for box in self._owned], device)

    def step(self, grad_norm: float, learning_rate: float) -> Movement:
        limit = self._config.max_grad_norm
        clip = 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6))
        for name, master in self._masters.items():
            master.grad = _gradient(self._parameters[name]).mul_(clip)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        probe = MovementProbe(self._masters.values())
        self._adamw.step()
        self.steps += 1
        movement = probe.after([each.grad for each in self._masters.values()])
        with torch.no_grad():
            for name, master in self._masters.items():
                master.grad = None
                if (parameter := self._parameters[name]) is not master:
                    parameter.copy_(master)
        return movement

    # --- the state ---------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        kinds = {
            kind: {name: self._adamw.state[each][kind] for name, each in self._masters.items()}
            for kind in (MOMENTS if self.steps else ())
        }
        if masters := {name: each.detach() for name, each in self._own_masters()}:
            kinds[MASTER] = masters
        return kinds

    @torch.no_grad()
    def load(self, kinds: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        self._adamw.state.clear()
        self.steps = steps
        for name, master in self._own_masters():
            master.copy_(kinds[MASTER][name])
        if not steps:
            return
        for name, master in self._masters.items():
            self._adamw.state[master] = {
                "step": torch.tensor(float(steps), device=master.device),
                **{kind: kinds[kind][name].to(master.device) for kind in MOMENTS},
            }

    @torch.no_grad()
    def reset(self) -> None:
        self._adamw.state.clear()
        self.steps = 0
        for name, master in self._own_masters():
            master.copy_(self._parameters[name])

    def _own_masters(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                yield name, master


class BufferUpdates:
    """Gradients in the library's buffers, and the optimizer that applies them."""

    def __init__(
        self,
        gradients: Gradients,
        optimizer: RankOptimizer,
        config: OptimizerConfig,
        whole_norm: Callable[[float, float], float],
    ) -> None:
        """``whole_norm``: (norm of the layout's ranks, denominator) -> norm of all gradients."""
        self._gradients, self._optimizer = gradients, optimizer
        self._config, self._whole_norm = config, whole_norm

    def begin(self) -> None:
        """Zero the gradients; no hook reduces them while the step is open."""
        self._gradients.begin()

    def step(self, denominator: float, learning_rate: float) -> UpdateResult:
        """Reduce and clip the gradients and update the weights, if the norm is finite."""
        self._gradients.reduce(denominator)
        norm = self._whole_norm(self._optimizer.grad_norm(), denominator)
        if not is_applicable(norm, self._config.max_grad_norm):
            return UpdateResult(applied=False, grad_norm=norm)
        movement = self._optimizer.step(norm, learning_rate)
        return UpdateResult(applied=True, grad_norm=norm, movement=movement)

    def drop_gradients(self) -> None:
        """Restore the hooks and discard the gradients. Idempotent."""
        self._gradients.restore()
        self._gradients.zero()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue] -- the library's


def norm_over_layout(gradients: Sequence[Tensor], device: torch.device) -> float:
    """Return the norm of the gradients of all ranks of the layout, which all call it."""
    squares = torch.tensor(sum_squares(gradients), dtype=torch.float64, device=device)
    dist.all_reduce(squares, group=layout_group())
    return math.sqrt(float(squares))

"""AdamW over the library's gradient buffers: every rank updates its whole share of the model.

Half-precision parameters get a float32 master each. Moments are as large as this rank's share of
the model. ``ShardedAdamW`` has the same interface and needs less memory, on CUDA.

``ShardedAdamW`` uses the library's distributed optimizer, which is sharded over data-parallel
ranks.

Gradients are reduce-scattered, every rank updates its part of each buffer, and the new weights are
gathered. A part is a range of a flattened parameter, not a box. So states are gathered when they
are saved and split when they are loaded. They equal the states of ``MainGradAdamW`` and fit any
layout.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportMissingTypeStubs=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# megatron-core has no types.
# megatron-core has no types, and annotates None away where it allows it.

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as LibraryConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.models.plain import HALF
from offbeat.plugins.megatron.gradients import Gradients
from offbeat.plugins.megatron.groups import layout_group, tensor_group
from offbeat.plugins.megatron.hf_files import view_box
from offbeat.plugins.megatron.mapping import TensorBox
from offbeat.trainers.movement import Movement, MovementProbe, UpdateResult
from offbeat.trainers.torch.optimizer import is_applicable, make_adamw, sum_squares

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
MASTER: Final = "master"


class RankState(ABC):
    """State of AdamW over a rank's trained parameters, by kind, then by the parameter's name.

    Its form is the same for all subclasses. Its size is that of this rank's share.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """``dtype``: dtype of the weights in passes. 16-bit weights have float32 masters."""
        self.steps = 0  # updates since the state was new
        self._has_masters = dtype in HALF
        self._wide = max(torch.float32.itemsize, dtype.itemsize)

    @abstractmethod
    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return moments, and masters if there are any. All ranks must call it."""

    @abstractmethod
    def load(self, kinds: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Load a ``state`` of the same parameters. The caller loads the weights."""

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
    """AdamW of the trained part of one rank's share of a model. Only matrices decay."""

    sharded: ClassVar[bool]
    """True if it needs gradients that are reduce-scattered over data-parallel ranks."""

    def __init__(
        self, ddp: DistributedDataParallel, config: OptimizerConfig, owned: Sequence[TensorBox]
    ) -> None:
        """Start without moments, from the current weights.

        Args:
            ddp: A module with a ``main_grad`` for each trained parameter. Others are not updated.
            config: Rates and bounds.
            owned: Boxes of these parameters that this rank owns. Every element is in one box of one
                rank.
        """
        self._config, self._owned = config, owned
        self._parameters: dict[str, nn.Parameter] = {
            name: each for name, each in ddp.module.named_parameters() if each.requires_grad
        }
        super().__init__(next(iter(self._parameters.values())).dtype)

    @abstractmethod
    def grad_norm(self) -> float:
        """Return the norm of reduced gradients over all ranks of the layout. All must call it."""

    @abstractmethod
    def step(self, grad_norm: float, learning_rate: float) -> Movement:
        """Clip by this norm, which is finite, and update the weights. All ranks must call it.

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
        self._adamw = make_adamw(self._masters.values(), config)

    def grad_norm(self) -> float:
        """Return the norm over owned boxes, in which replicas and tied embeddings count once."""
        gradients = {name: _gradient(each) for name, each in self._parameters.items()}
        device = next(iter(gradients.values())).device
        return norm_over_layout([view_box(gradients, box) for box in self._owned], device)

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
        """Zero the gradients. No hook reduces them while the step is open."""
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
    """Return the norm of the gradients of all ranks of the layout. All of them must call it."""
    squares = torch.tensor(sum_squares(gradients), dtype=torch.float64, device=device)
    dist.all_reduce(squares, group=layout_group())
    return math.sqrt(float(squares))


_DENSE: Final = ("buffers", "intra_dp_cp_group", "mp_group")
_EXPERTS: Final = ("expert_parallel_buffers", "intra_expt_dp_group", "expt_tp_pp_group")
"""Attribute with the gradients' buffers, and process groups of replicas and of a model's parts."""


def make_distributed_adamw(ddp: DistributedDataParallel, config: LibraryConfig) -> ChainedOptimizer:
    """Return the optimizer of the dense layers, chained with the experts' optimizer, if any.

    Only ranks of the layout call it. The library's own ``get_megatron_optimizer`` gathers the
    groups of parameters from all ranks of the world as pickles. Encoder ranks do not call it, and a
    pickle may run any code. The groups here follow from the model's config, and may be empty.
    """
    has_experts = ddp.config.num_moe_experts is not None
    kinds = (_DENSE, _EXPERTS) if has_experts else (_DENSE,)
    return ChainedOptimizer([_of_kind(ddp, config, *kind) for kind in kinds])


def _of_kind(
    ddp: DistributedDataParallel, config: LibraryConfig, buffers: str, replicas: str, parts: str
) -> DistributedOptimizer:
    groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
        None, [ddp], use_gloo_process_groups=False
    )
    adamw = torch.optim.AdamW(
        _parameter_groups(ddp, of_experts=buffers == _EXPERTS[0]),
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    made = DistributedOptimizer(
        adamw,
        config,
        grad_scaler=None,
        init_state_fn=_no_state,
        model_chunks=[ddp],
        per_model_buffers={0: getattr(ddp, buffers)},
        data_parallel_group=groups[replicas],
        data_parallel_group_gloo=None,
        data_parallel_group_idx=groups[parts].rank(),
        distributed_optimizer_instance_id=0,
    )
    # The constructor accepts neither, so the library's own function sets them afterwards, too.
    made.grad_stats_parallel_group = layout_group()
    made.tp_group = tensor_group()
    return made


def _parameter_groups(ddp: DistributedDataParallel, *, of_experts: bool) -> list[dict[str, Any]]:
    """Return matrices, which decay, and vectors, which do not."""
    groups: list[dict[str, Any]] = [{"params": [], "wd_mult": each} for each in (1.0, 0.0)]
    for each in ddp.module.parameters():
        if each.requires_grad and _is_of_experts(each) == of_experts:
            groups[each.ndim <= 1]["params"].append(each)
    return groups


def _is_of_experts(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has its gradient summed over the ranks with the same experts."""
    return not getattr(parameter, "allreduce", True)


def _no_state(*_: object) -> None:
    """Leave the moments to AdamW, which creates them at its first step."""


_STEP: Final = "step"


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter of this rank, with the part of it that this rank updates, if any."""

    parameter: nn.Parameter
    optimizer: DistributedOptimizer
    main: Tensor | None  # the part in float32, to which the moments belong
    part: slice  # range of the flattened parameter


class ShardedAdamW(RankOptimizer):
    """AdamW on this rank's part of the parameters that it shares with its data-parallel peers.

    Weights and gradients are float32 or have 16 bits. The gradients are reduce-scattered by a
    ``DistributedDataParallel`` with ``sharded``.
    """

    sharded: ClassVar[bool] = True

    def __init__(
        self, ddp: DistributedDataParallel, config: OptimizerConfig, owned: Sequence[TensorBox]
    ) -> None:
        super().__init__(ddp, config, owned)
        dtype = next(iter(self._parameters.values())).dtype
        beta1, beta2 = config.betas
        # One for matrices and vectors of dense layers, possibly one for experts
        self._library = make_distributed_adamw(
            ddp,
            LibraryConfig(
                optimizer="adam",
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adam_beta1=beta1,
                adam_beta2=beta2,
                adam_eps=config.eps,
                clip_grad=config.max_grad_norm or 0.0,
                use_distributed_optimizer=True,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
            ),
        )
        self._chained = cast("list[DistributedOptimizer]", self._library.chained_optimizers)
        self._places = dict(self._all_places())

    def grad_norm(self) -> float:
        """Return the norm of the whole model's reduced gradients. All ranks must call it.

        Every element counts on one rank. Parts do not overlap. If a parameter is replicated on
        tensor-parallel ranks or on two stages, the library counts one copy.
        """
        self._library.prepare_grads()
        parts = [part for each in self._chained for part in each.get_main_grads_for_grad_norm()]
        return norm_over_layout(parts, torch.device("cuda"))

    def step(self, grad_norm: float, learning_rate: float) -> Movement:
        """Clip by this norm, the result of ``grad_norm``, and update. All ranks must call it."""
        if (limit := self._config.max_grad_norm) is not None:
            for each in self._chained:
                parts = cast("list[Tensor]", each.get_parameters())
                clip_grad_by_total_norm_fp32(parts, limit, grad_norm)
        for group in self._library.param_groups:
            group["lr"] = learning_rate
            # The library's own scheduler would set this. The multiple is 0 for vectors.
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        mains = [cast("Tensor", main) for each in self._chained for main in each.get_parameters()]
        probe = MovementProbe(mains)
        self._library.step_with_ready_grads()
        movement = probe.after([each.grad for each in mains])
        for main in mains:
            main.grad = None
        self.steps += 1
        return movement

    # --- the state ---------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {
            kind: {name: self._whole(place, kind) for name, place in self._places.items()}
            for kind in self.kinds(self.steps)
        }

    @torch.no_grad()
    def load(self, kinds: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        self._clear()
        for name, place in self._places.items():
            if place.main is None:
                continue
            if MASTER in kinds:
                place.main.copy_(kinds[MASTER][name].view(-1)[place.part])
            if steps:
                moments = {kind: kinds[kind][name].view(-1)[place.part] for kind in MOMENTS}
                place.optimizer.optimizer.state[place.main] = {
                    _STEP: torch.tensor(float(steps)),
                    **{kind: each.to(place.main, copy=True) for kind, each in moments.items()},
                }
        self.steps = steps

    @torch.no_grad()
    def reset(self) -> None:
        self._clear()
        self._library.reload_model_params()

    def _clear(self) -> None:
        for each in self._chained:
            each.optimizer.state.clear()
        self.steps = 0

    @torch.no_grad()
    def _whole(self, place: _Place, kind: str) -> Tensor:
        """Gather one parameter's master or moment from all data-parallel ranks, on the CPU."""
        whole = torch.zeros_like(place.parameter, dtype=torch.float32).view(-1)
        if place.main is not None:
            moments = place.optimizer.optimizer.state[place.main]
            whole[place.part] = place.main if kind == MASTER else moments[kind]
        dist.all_reduce(whole, group=place.optimizer.data_parallel_group)
        return whole.view(place.parameter.shape).cpu()

    def _all_places(self) -> Iterator[tuple[str, _Place]]:
        """Yield the places in an order that is the same on all ranks that share a parameter."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        for optimizer in self._chained:
            for buffer in optimizer.buffers:
                for parameter in buffer.param_index_map:
                    yield names[parameter], _place(optimizer, parameter)


def _place(optimizer: DistributedOptimizer, parameter: nn.Parameter) -> _Place:
    if parameter not in optimizer.model_param_gbuf_map:
        return _Place(parameter, optimizer, None, slice(0, 0))
    buffer, dtype, bucket = optimizer.model_param_gbuf_map[parameter]
    ranges: Any = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
    group, order = optimizer.model_param_group_index_map[parameter]
    main = optimizer.param_groups[group]["params"][order]
    return _Place(parameter, optimizer, main, slice(ranges.start, ranges.end))

"""AdamW over raw gradient sums: normalise, clip, check and step in one place.

Each half-precision parameter gets a float32 master. Gradients are summed and weights are updated in
the masters, because a step of 1e-6 is lost in bfloat16's eight bits. The model keeps its dtype.

If the model is sharded, each rank updates its shards. AdamW is elementwise, so only the norm needs
a collective. If several tensor ranks hold a copy of a weight, the norm counts it once, and its
copies get the same gradient, bit for bit.
"""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final
from zlib import crc32

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.models.plain import HALF
from offbeat.trainers.movement import NOT_UPDATED, MovementProbe, UpdateResult
from offbeat.trainers.ranks.peers import Peers, SingleRank
from offbeat.trainers.torch.sharding import RankMesh, cut_like, own

_BLOCK: Final = 1 << 20
"""Number of elements that are rounded at once. It bounds the memory for the random noise."""

_HALF_STEP: Final = 1 << 15
"""Half the distance between two bfloat16 numbers, counted in float32 numbers."""


def round_stochastically(weights: Tensor, masters: Tensor, name: str, updates: int) -> None:
    """Set ``weights`` to ``masters``, each rounded up or down to a bfloat16 neighbour at random.

    A master that is an exact bfloat16 value stays the same. A step at a rate of 1e-5 changes most
    weights by less than the distance between two bfloat16 numbers. With rounding to nearest, these
    weights would not change for several steps. Here the probability of rounding up is the truncated
    part, so the expected value of a weight is its master (Gupta et al. 2015, arXiv:1502.02551,
    section 2). The noise depends only on the parameter's name and its number of updates, so a
    resumed run has the same weights, bit for bit.

    Args:
        weights: [...] bfloat16, changed in place.
        masters: [...] float32, finite, of the same shape and device.
        name: Name of the parameter. Two parameters get different noise.
        updates: Number of updates of the parameter by the optimizer.
    """
    generator = torch.Generator(masters.device).manual_seed(crc32(f"{name} {updates}".encode()))
    rows = masters.shape[0] if masters.ndim else 1
    per_block = max(1, _BLOCK * rows // max(1, masters.numel()))
    pairs = zip(_blocks(weights, per_block), _blocks(masters, per_block), strict=True)
    for rounded, exact in pairs:
        bits = exact.contiguous().view(torch.int32)
        noise = _noise(bits.shape, generator).to(torch.int32)  # torch adds two widths slowly
        kept = noise.add_(bits).add_(_HALF_STEP).bitwise_and_(-2 * _HALF_STEP)
        rounded.copy_(kept.view(torch.float32))


def _blocks(tensor: Tensor, rows: int) -> tuple[Tensor, ...]:
    return torch.split(tensor, rows) if tensor.ndim else (tensor,)


def _noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return uniform int16 noise of this shape. Each drawn number yields four values."""
    numbers = torch.empty(-(-shape.numel() // 4), dtype=torch.int64, device=generator.device)
    numbers.random_(torch.iinfo(torch.int64).min, None, generator=generator)
    return numbers.view(torch.int16)[: shape.numel()].view(shape)


STEPS: Final = "steps"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_LARGEST_SQUARED: Final = torch.finfo(torch.float32).max ** 0.5
_FLOAT: Final = msgspec.msgpack.Decoder(float)


class Optimizer:
    """AdamW of the trainable parameters of a module. Weight decay applies to matrices only.

    If the module is sharded, all ranks must create an optimizer and make the same calls.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimizerConfig,
        peers: Peers | None = None,
        mesh: RankMesh | None = None,
    ) -> None:
        """Create the optimizer of a module.

        ``mesh`` has the axes over which the module is sharded. It is None if the module is whole,
        or is sharded only over data ranks.
        """
        self._config, self._peers, self._mesh = config, peers or SingleRank(), mesh
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._names, self._parameters = list(trained), list(trained.values())
        self._masters = [_master(each) for each in self._parameters]
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if _is_copy(parameter, master):
                parameter.register_post_accumulate_grad_hook(_adder(master))
        self._adamw = make_adamw(self._masters, config)

    def step(self, denominator: float, learning_rate: float) -> UpdateResult:
        """Divide the summed gradients, clip them, update the weights and discard the gradients.

        If AdamW cannot apply gradients of this norm, weights and moments stay the same.
        """
        gradients, copies = self._gradients(), self._equalise()
        norm = self._norm(self._select_counted(), copies) / denominator
        applied = is_applicable(norm, self._config.max_grad_norm)
        movement = NOT_UPDATED
        if applied:
            probe = MovementProbe(self._masters)
            limit = self._config.max_grad_norm
            clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
            if gradients:
                torch._foreach_mul_(gradients, clip / denominator)  # pyright: ignore -- no public form
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            movement = probe.after([each.grad for each in self._masters])
            self._write_back()
        self.drop_gradients()
        return UpdateResult(applied, norm, movement)

    def begin(self) -> None:
        """Prepare for the first microbatch of an update, without gradients."""
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients. Weights and moments are unchanged."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.grad = None
            master.grad = None

    @torch.no_grad()
    def reset(self) -> None:
        """Return to the initial state. The caller must have written the module's weights before."""
        self.drop_gradients()
        self._adamw.state.clear()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if _is_copy(parameter, master):
                master.copy_(parameter)

    @property
    def names(self) -> Collection[str]:
        """Return the names of the parameters that the optimizer updates."""
        return self._names

    def masters(self) -> dict[str, Tensor]:
        """Return the float32 masters of 16-bit parameters by name. Empty for a sharded module."""
        return {name: each for name, own, each in self._iterate() if _is_copy(own, each)}

    def moments(self) -> dict[str, Tensor]:
        """Return AdamW's moments by kind and parameter name: the tensors themselves, not copies.

        The moments of a sharded parameter are sharded like it.
        """
        return {
            f"{kind}/{name}": cut_like(self._adamw.state[master][kind], parameter)
            for name, parameter, master in self._iterate()
            if master in self._adamw.state
            for kind in _MOMENTS
        }

    def steps(self) -> Tensor:
        """Return [parameters], a copy: the number of updates of each parameter, in order."""
        if not self._masters:
            return torch.zeros(0)
        never = torch.zeros((), dtype=torch.float32, device=self._masters[0].device)
        states = (self._adamw.state.get(each, {}) for each in self._masters)
        return torch.stack([each.get("step", never) for each in states])

    @torch.no_grad()
    def make_room(self, names: Collection[str]) -> None:
        """Allocate zeroed moments for these names only."""
        self.drop_gradients()
        self._adamw.state.clear()
        for name, _, master in self._iterate():
            kinds = [kind for kind in _MOMENTS if f"{kind}/{name}" in names]
            if kinds:
                # Another thread that makes a 16-bit model has changed torch's default dtype.
                step = torch.zeros((), dtype=torch.float32, device=master.device)
                moments = {kind: torch.zeros_like(master) for kind in kinds}
                self._adamw.state[master] = {"step": step, **moments}

    @torch.no_grad()
    def resume_filled(self, steps: Tensor) -> None:
        """Continue with masters and moments that the caller has filled.

        16-bit weights of the module are set from the masters.
        """
        for master, count in zip(self._masters, steps, strict=True):
            if master in self._adamw.state:
                self._adamw.state[master]["step"].copy_(count)
        self._write_back()

    @property
    def state_nbytes(self) -> int:
        """Return the bytes of the updated weights, in full precision, and of their moments."""
        each_takes = 1 + len(_MOMENTS)
        return sum(
            parameter.numel() * master.element_size() * each_takes
            for _, parameter, master in self._iterate()
        )

    def _iterate(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        return zip(self._names, self._parameters, self._masters, strict=True)

    def _gradients(self) -> list[Tensor]:
        """Return the gradients of the masters, and of a sharded parameter this rank's part."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if isinstance(parameter, DTensor):
                master.grad = None if parameter.grad is None else own(parameter.grad)
        return self._master_gradients()

    def _equalise(self) -> float:
        """Equalise the copies of each gradient.

        Return NaN if this rank's copies were not finite, else 0.
        """
        if self._mesh is None:
            return 0.0
        copies = self._master_gradients(self._mesh.is_copied)
        squares = sum_squares(copies)
        self._mesh.equalise(copies)
        return 0.0 * squares

    def _select_counted(self) -> list[Tensor]:
        """Return the gradients of ``_gradients`` that this rank adds to the norm."""
        return self._master_gradients(None if self._mesh is None else self._mesh.counts)

    def _master_gradients(self, is_wanted: Callable[[Tensor], bool] | None = None) -> list[Tensor]:
        """Return the masters' gradients for the wanted parameters, or for all if None."""
        return [
            master.grad
            for parameter, master in zip(self._parameters, self._masters, strict=True)
            if master.grad is not None and (is_wanted is None or is_wanted(parameter))
        ]

    def _norm(self, gradients: list[Tensor], others: float) -> float:
        """Return the norm over all ranks.

        It is equal on each rank, so that either all of them step or none. ``others`` is a term that
        this rank adds to the sum of squares.
        """
        mine = others + sum_squares(gradients)
        return math.sqrt(sum(self._peers.all_gather(mine, _FLOAT)))

    @torch.no_grad()
    def _write_back(self) -> None:
        is_random = self._config.rounding == "stochastic"
        for name, parameter, master in self._iterate():
            if _is_copy(parameter, master):
                if is_random:
                    round_stochastically(parameter, master, name, self._updates(master))
                else:
                    parameter.copy_(master)

    def _updates(self, master: Tensor) -> int:
        state = self._adamw.state.get(master)
        return int(state["step"]) if state else 0


def _master(parameter: nn.Parameter) -> Tensor:
    """Return the tensor that AdamW updates: the parameter, this rank's shard, or a float32 copy."""
    if isinstance(parameter, DTensor):
        return own(parameter.detach()).requires_grad_()
    if parameter.dtype not in HALF:
        return parameter
    return parameter.detach().float().requires_grad_()


def make_adamw(updated: Collection[Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return torch's AdamW for these tensors. Weight decay applies only to matrices."""
    decayed = [each for each in updated if each.ndim > 1]
    others = [each for each in updated if each.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def is_applicable(norm: float, limit: float | None) -> bool:
    """Return whether AdamW can apply gradients of this norm, which it squares in float32.

    ``limit`` is the norm to which the gradients are clipped before, or None without clipping.
    """
    return norm < (_LARGEST_SQUARED if limit is None else float("inf"))  # False for NaN too


def sum_squares(gradients: Sequence[Tensor]) -> float:
    """Return the sum of the squares of this rank's parts, in float64. float32 would overflow."""
    if not gradients:
        return 0.0
    norms: list[Tensor] = [
        torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients
    ]
    return float(torch.stack(norms).square().sum())


def _is_copy(parameter: nn.Parameter, master: Tensor) -> bool:
    return master is not parameter and not isinstance(parameter, DTensor)


def _adder(master: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds a gradient to its master as soon as backward has computed it."""

    def add(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            wide = gradient.float()
            master.grad = wide if master.grad is None else master.grad.add_(wide)

    return add

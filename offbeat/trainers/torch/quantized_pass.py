"""Forward passes with the weights that engines of ``sync.quantize`` compute with."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from offbeat.trainers.expert_names import metas_apart, named_apart
from offbeat.trainers.torch.sharding import cut_like, local_region
from offbeat.weight_sync.precision import is_quantized
from offbeat.weight_sync.quantize import rounded
from offbeat.weight_sync.region import Shape


def has_quantized(name: str, shape: Shape) -> bool:
    """Return whether releases quantize a weight, or matrices of experts that it joins."""
    metas = metas_apart([(name, shape, "")])
    return any(is_quantized(each, part) for each, part, _ in metas)


def as_quantized(name: str, weight: Tensor) -> Tensor:
    """Return a copy of a whole weight with each matrix that releases quantize rounded as they are.

    Raises:
        UnquantizableWeights: A block holds an infinity or a NaN.
    """
    made = weight.detach().clone()
    for each, matrix in named_apart([(name, made)]):
        if is_quantized(each, tuple(matrix.shape)):
            matrix.copy_(rounded(each, matrix))
    return made


@contextmanager
def quantized_matrices(model: nn.Module) -> Generator[None]:
    """Compute inside the block as engines do that hold quantized matrices.

    The matrices of a module are rounded when the pass reaches it, after its ranks have gathered them,
    and are what they were when it has left: one module's are there twice at a time. Without gradients.
    All ranks enter it together.
    """
    handles = [
        handle
        for prefix, module in model.named_modules()
        if (names := _quantized_in(prefix, module))
        for handle in _Exchange(module, prefix, names).hooks()
    ]
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def _quantized_in(prefix: str, module: nn.Module) -> list[str]:
    own = module.named_parameters(recurse=False)
    return [key for key, each in own if has_quantized(f"{prefix}.{key}", tuple(each.shape))]


class _Exchange:
    """Exchanges some parameters of a module for rounded ones while it computes."""

    def __init__(self, module: nn.Module, prefix: str, names: Sequence[str]) -> None:
        self._module, self._prefix, self._names = module, prefix, names
        self._kept = dict[str, Tensor]()

    def hooks(self) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            self._module.register_forward_pre_hook(self._round),
            self._module.register_forward_hook(self._put_back, always_call=True),
        ]

    def _round(self, *_: object) -> None:
        for key in self._names:
            weight = self._module.get_parameter(key)
            made = _rounded(f"{self._prefix}.{key}", weight)
            self._kept[key] = weight
            setattr(self._module, key, nn.Parameter(made, requires_grad=False))

    def _put_back(self, *_: object) -> None:
        while self._kept:
            setattr(self._module, *self._kept.popitem())


def _rounded(name: str, weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return as_quantized(name, weight)
    # A rank's part may end inside a block, whose scale depends on all of it
    whole = as_quantized(name, weight.full_tensor())
    return cut_like(whole[local_region(weight).slices].contiguous(), weight)

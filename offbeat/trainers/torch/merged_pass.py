"""Forward passes with the sums of matrices and adapters that engines compute with."""

# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types, and peft is an extra.

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from offbeat.trainers.torch.lora import adapted_modules, base_of, side_of, without_adapters
from offbeat.trainers.torch.sharding import cut_like, local_region
from offbeat.weight_sync.adapter import merged


@contextmanager
def merged_matrices(model: PreTrainedModel, scaling: float) -> Generator[None]:
    """Compute inside the block with ``W + scaling * B A``, rounded once to the dtype of ``W``.

    The matrix of a module is exchanged when the pass reaches it, after its ranks have gathered it, and
    is what it was when it has left: one module's is there twice at a time. Without gradients. All
    ranks enter it together.
    """
    handles = [
        handle
        for path in adapted_modules(model)
        for handle in _Exchange(model, path, scaling).hooks()
    ]
    try:
        with without_adapters(model):
            yield
    finally:
        for each in handles:
            each.remove()


class _Exchange:
    """Exchanges the matrix of an adapted module for the sum while the module computes."""

    def __init__(self, model: nn.Module, path: str, scaling: float) -> None:
        self._module = model.get_submodule(path)
        self._base: Any = model.get_submodule(base_of(model, path))
        self._first: Any = model.get_submodule(side_of(path, "A"))
        self._second: Any = model.get_submodule(side_of(path, "B"))
        self._scaling = scaling
        self._kept: nn.Parameter | None = None

    def hooks(self) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            self._module.register_forward_pre_hook(self._add),
            self._module.register_forward_hook(self._put_back, always_call=True),
        ]

    def _add(self, *_: object) -> None:
        weight = self._base.weight
        sides = _whole(self._first.weight), _whole(self._second.weight)
        made = merged(_whole(weight), *sides, self._scaling)
        if isinstance(weight, DTensor):
            made = cut_like(made[local_region(weight).slices].contiguous(), weight)
        self._kept = weight
        self._base.weight = nn.Parameter(made, requires_grad=False)

    def _put_back(self, *_: object) -> None:
        if self._kept is not None:
            self._base.weight, self._kept = self._kept, None


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight

"""Forward passes with the weights that engines of ``sync.quantize`` compute with."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from offbeat.trainers.expert_names import APART, named_apart
from offbeat.trainers.torch.sharding import cut_like, local_region
from offbeat.weight_sync.precision import is_quantized
from offbeat.weight_sync.quantize import rounded
from offbeat.weight_sync.region import Shape


def has_quantized(name: str, shape: Shape) -> bool:
    """Return whether releases quantize a weight, or matrices of experts that it joins."""
    metas = APART.metas([(name, shape, "float32")])
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


def quantized_matrices(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a model computes as engines do that hold quantized matrices.

    Without gradients. All ranks enter it together.
    """
    return exchanged_weights(
        (module, module, key, partial(as_quantized, f"{prefix}.{key}"))
        for prefix, module in model.named_modules()
        for key, each in module.named_parameters(recurse=False)
        if has_quantized(f"{prefix}.{key}", tuple(each.shape))
    )


@contextmanager
def exchanged_weights(
    exchanges: Iterable[tuple[nn.Module, nn.Module, str, Callable[[Tensor], Tensor]]],
) -> Generator[None]:
    """Exchange weights inside the block for others while the modules that read them compute.

    A weight is exchanged when the pass reaches its module, after its ranks have gathered it, and
    put back when the pass has left: one module's are there twice at a time.

    Args:
        exchanges: The module that computes, the one that holds the weight, the weight's name there, and
            a function of the whole weight.
    """
    handles = [handle for each in exchanges for handle in _exchange(*each)]
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def _exchange(
    computes: nn.Module, holds: nn.Module, name: str, make: Callable[[Tensor], Tensor]
) -> list[RemovableHandle]:
    kept = list[Tensor]()

    def exchange(*_: object) -> None:
        weight = holds.get_parameter(name)
        made = make(whole_of(weight))
        if isinstance(weight, DTensor):  # this rank's part may end inside a block of one scale
            made = cut_like(made[local_region(weight).slices].contiguous(), weight)
        kept.append(weight)
        setattr(holds, name, nn.Parameter(made, requires_grad=False))

    def put_back(*_: object) -> None:
        if kept:
            setattr(holds, name, kept.pop())

    return [
        computes.register_forward_pre_hook(exchange),
        computes.register_forward_hook(put_back, always_call=True),
    ]


def whole_of(weight: Tensor) -> Tensor:
    """Return a whole weight, gathered if it is sharded."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight

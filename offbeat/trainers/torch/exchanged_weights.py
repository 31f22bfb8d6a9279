"""Forward passes with weights other than the trained ones, exchanged while a module computes."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from offbeat.trainers.torch.sharding import cut_like, local_region


@contextmanager
def exchange_weights(
    exchanges: Iterable[tuple[nn.Module, nn.Module, str, Callable[[Tensor], Tensor]]],
) -> Generator[None]:
    """Exchange weights, inside the block, while the modules that read them compute.

    A weight is exchanged when the pass reaches its module, after the ranks have gathered the
    weight. It is restored when the pass leaves the module. So only one module's weights exist twice
    at a time.

    Args:
        exchanges: The module that computes, the one that holds the weight, the weight's name there,
            and a function of the whole weight.
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
        made = make(gather_whole(weight))
        if isinstance(weight, DTensor):  # this rank's part may end inside a block with one scale
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


def gather_whole(weight: Tensor) -> Tensor:
    """Return a whole weight, gathered if it is sharded."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight

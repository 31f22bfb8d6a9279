"""An output head whose logits are computed, used and discarded chunk by chunk.

The logits of a row of 32k tokens over 49k words are 6 GiB in float32, and their gradient as much
again. Of each token only a log-probability and an entropy are read. Each chunk of places computes
these from logits of its own, and computes the logits again in backward.

Legend: U places that predict, V vocabulary, N wanted tokens.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offbeat.trainers.batches.packing import PackedRows

OfLogits = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""A function of logits [U, V], and of each token's place in U and id [N]; yields tensors [N]."""

_ON_A_CPU: Final = 1 << 27
_ON_A_GPU: Final = 1 << 29
"""Number of logits of a chunk: 512 MiB in float32, and 1 GiB in bfloat16. Fewer are not chunked."""


def chunk_places(vocabulary: int, device: torch.device) -> int:
    """Return the number of places whose logits are computed together."""
    return max(1, (_ON_A_CPU if device.type == "cpu" else _ON_A_GPU) // vocabulary)


@contextmanager
def chunked_head(
    head: nn.Module, packed: PackedRows, compute: OfLogits, places: int
) -> Generator[Callable[[Tensor], tuple[Tensor, ...]]]:
    """Replace the output of a head by what ``compute`` makes of its logits, inside the block.

    Hooks do so while the model's forward runs, because the weights of a sharded model exist only
    then. The model must return the head's output as it is.

    Args:
        head: The module that maps hidden states to logits.
        packed: Microbatch with the places and tokens.
        compute: Function of the logits of a chunk.
        places: Number of places in a chunk.

    Yields:
        A function of what the model returns as logits; yields tensors [N] in the order of
        ``packed.which_N``.
    """
    order_N = np.argsort(packed.which_N, kind="stable")
    hidden = list[Tensor]()

    def keep(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (hidden_RTH,) = inputs
        hidden_PH = hidden_RTH.reshape(-1, hidden_RTH.shape[-1])
        hidden.append(hidden_PH)
        return (hidden_PH[:0],)

    def replace(_: nn.Module, __: tuple[Tensor], ___: Tensor) -> Tensor:
        return _in_chunks(head, hidden.pop(), packed, order_N, compute, places)

    def unpack(returned: Tensor) -> tuple[Tensor, ...]:
        position_N = torch.from_numpy(np.argsort(order_N)).to(returned.device)
        return returned[:, position_N].unbind()

    handles = (head.register_forward_pre_hook(keep), head.register_forward_hook(replace))
    try:
        yield unpack
    finally:
        for handle in handles:
            handle.remove()


def _in_chunks(
    head: nn.Module,
    hidden_PH: Tensor,
    packed: PackedRows,
    order_N: np.ndarray[tuple[int], np.dtype[np.int64]],
    compute: OfLogits,
    places: int,
) -> Tensor:
    """Return the tensors [N] of ``compute``, stacked, in the order ``order_N``."""
    device = hidden_PH.device

    def of_chunk(hidden_UH: Tensor, which_N: Tensor, target_N: Tensor) -> Tensor:
        return torch.stack(compute(head.forward(hidden_UH), which_N, target_N))

    which_N, target_N = packed.which_N[order_N], packed.target_N[order_N]
    parts = list[Tensor]()
    for first in range(0, len(packed.predicts_U), places):
        begin, end = np.searchsorted(which_N, (first, first + places))
        predicts_U, own_N, targets_N = (
            torch.from_numpy(each).to(device, non_blocking=True)
            for each in (
                packed.predicts_U[first : first + places],
                which_N[begin:end] - first,
                target_N[begin:end],
            )
        )
        hidden_UH = hidden_PH.index_select(0, predicts_U)
        if torch.is_grad_enabled():
            part = checkpoint(
                of_chunk,
                hidden_UH,
                own_N,
                targets_N,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            part = of_chunk(hidden_UH, own_N, targets_N)
        parts.append(cast("Tensor", part))
    return torch.cat(parts, 1)

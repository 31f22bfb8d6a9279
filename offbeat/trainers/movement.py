"""Check that an optimizer step changed some of the weights that it updates.

The check finds an optimizer that updates different tensors from the ones the model computes with.
It also finds a learning rate below the resolution of float32. Such a run still looks like training:
a finite loss, a gradient norm, new versions of the same weights. Up to 64 elements of each tensor
are copied before the step and compared after it. So the check costs two small copies per step, for
any model size.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from offbeat.messages.failures import WeightsUnmoved
from offbeat.trainers.ranks.peers import Peers

_SAMPLED: Final = 64  # elements per tensor


class Movement(NamedTuple):
    """Comparison of one rank's sampled weights before and after a step."""

    moved: bool  # a sampled element has a different value than before the step
    expected: int  # sampled elements that had a gradient; only counted when none moved


_MOVEMENTS: Final = msgspec.msgpack.Decoder(Movement)
NOT_UPDATED: Final = Movement(moved=False, expected=0)
"""Value for a step that was not applied."""


class UpdateResult(NamedTuple):
    """Result of an optimizer step. The weights were updated only if ``applied`` is true."""

    applied: bool
    grad_norm: float  # after normalisation, before clipping
    movement: Movement = NOT_UPDATED  # of this rank's weights


class MovementProbe:
    """Compares a sample of the tensors that an optimizer updates before and after one step."""

    def __init__(self, updated: Iterable[Tensor]) -> None:
        """Copy the sample of ``updated``: the float32 masters, or else the weights."""
        self._updated = [each.detach() for each in updated]
        self._before = _sample(self._updated)

    def after(self, gradients: Sequence[Tensor | None]) -> Movement:
        """Compare the sample with the weights. ``gradients`` are the applied ones by tensor."""
        if not torch.equal(self._before, _sample(self._updated)):
            return Movement(moved=True, expected=0)
        expected = sum(
            int(_elements(each).count_nonzero()) for each in gradients if each is not None
        )
        return Movement(moved=False, expected=expected)


def check_moved(
    peers: Peers, movement: Movement, *, step: int, learning_rate: float, grad_norm: float
) -> None:
    """Check that the weights changed on some rank, or that no change was due.

    All ranks must call it.

    Raises:
        WeightsUnmoved: The step had a learning rate and a gradient, and no sampled weight moved.
    """
    seen = peers.all_gather(movement, _MOVEMENTS)
    expected = sum(count for _, count in seen)
    if not any(moved for moved, _ in seen) and expected and learning_rate > 0 and grad_norm > 0:
        raise WeightsUnmoved(peers.rank, step, learning_rate, grad_norm, expected)


def _sample(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_elements(each) for each in tensors]) if tensors else torch.empty(0)


def _elements(tensor: Tensor) -> Tensor:
    """Return elements spread evenly over a tensor. Return none if it is empty or not contiguous."""
    if not tensor.numel() or not tensor.is_contiguous():
        return tensor.new_empty(0)
    return tensor.detach().view(-1)[:: -(-tensor.numel() // _SAMPLED)]

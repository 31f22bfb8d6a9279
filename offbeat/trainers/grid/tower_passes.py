"""Passes of a tower over microbatches of media, with the graph of one of them in memory at a time."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.messages.media import Media

Encode = Callable[[Media, bool], Tensor]
"""(media, whether with a graph) -> their features [blocks, F, H]."""


class TowerPasses:
    """Forward and backward passes over the media of one exchange.

    The forward pass keeps the graph of the last microbatch alone. The backward pass begins with it, and
    computes the others a second time, one by one. So a tower whose media are one microbatch computes
    nothing twice.
    """

    def __init__(self, own: Sequence[Media], count: int, padding: Media, encode: Encode) -> None:
        """Compute nothing yet.

        Args:
            own: Microbatches of this rank.
            count: Largest number of them on any rank, at least 1: ranks compute the tower together.
            padding: Media to compute in place of those that this rank lacks.
            encode: The tower.
        """
        self._microbatches = [*own, *[padding] * (count - len(own))]
        self._own, self._encode = len(own), encode
        self._last: Tensor | None = None  # features of the last microbatch, with their graph
        self._lengths = list[int]()  # number of features of each

    def forward(self, *, trained: bool) -> Tensor:
        """Return the features [blocks, F, H] of this rank's media, without a graph.

        With ``trained``, ``backward`` may follow.
        """
        made = list[Tensor]()
        for at, media in enumerate(self._microbatches, start=1):
            is_last = at == len(self._microbatches)
            each = self._encode(media, trained and is_last)
            if is_last:
                self._last = each
            made.append(each.detach())
        self._lengths = [each.shape[1] for each in made]
        whole = torch.cat(made, dim=1)
        return whole[:, : sum(self._lengths[: self._own])]

    def backward(self, gradient: Tensor) -> None:
        """Add the gradients of the tower's weights, given those [blocks, F, H] of the features.

        What is computed for other ranks alone gets gradients of zero.
        """
        blocks, own, hidden = gradient.shape
        more = gradient.new_zeros(blocks, sum(self._lengths) - own, hidden)
        whole = torch.cat([gradient, more], dim=1)
        parts: tuple[Tensor, ...] = torch.split(whole, self._lengths, dim=1)
        made, self._last = self._last, None
        for media, part in zip(reversed(self._microbatches), reversed(parts), strict=True):
            if made is None:
                made = self._encode(media, True)  # noqa: FBT003 -- its one flag
            if made.requires_grad:
                made.backward(part)
            made = None

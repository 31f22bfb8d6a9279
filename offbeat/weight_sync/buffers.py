"""Memory that is used again: the first touch of a page costs more than copying into it."""

import weakref
from collections import defaultdict

import torch
from torch import Tensor

from offbeat.weight_sync.chunks import Bytes


class Buffers:
    """Lends arrays, and takes each back when nobody holds it or a view of it any more.

    It keeps as much as was ever lent at once. Threads may share it.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def lend(self, nbytes: int) -> Bytes:
        """An array of ``nbytes`` with anything in it."""
        try:
            owner = self._free[nbytes].pop()
        except IndexError:
            owner = torch.empty(nbytes, dtype=torch.uint8)
        # numpy lets a view of a view refer to the owner directly, unless that is no array: so every
        # view refers to ``lent``, which is why the owner is a tensor.
        lent: Bytes = owner.numpy()
        weakref.finalize(lent, self._free[nbytes].append, owner).atexit = False
        return lent

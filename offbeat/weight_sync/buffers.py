"""Pool of reusable memory: the first touch of a page costs more than copying into it."""

import weakref
from collections import defaultdict

import torch
from torch import Tensor

from offbeat.weight_sync.chunks import Bytes


class Buffers:
    """Pool of arrays; an array returns to the pool when no view of it is referenced any more.

    The pool grows to the most memory that was ever in use at once. Thread-safe.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def lend(self, nbytes: int) -> Bytes:
        """Return an uninitialised array [nbytes] uint8."""
        try:
            owner = self._free[nbytes].pop()
        except IndexError:
            owner = torch.empty(nbytes, dtype=torch.uint8)
        # numpy lets a view of a view refer to the owner directly, unless that is no array: so every
        # view refers to ``lent``, which is why the owner is a tensor.
        lent: Bytes = owner.numpy()
        weakref.finalize(lent, self._free[nbytes].append, owner).atexit = False
        return lent

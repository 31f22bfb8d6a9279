"""Pool of reusable memory, because the first touch of a page costs more than copying into it."""

import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from offbeat.weight_sync.chunks import Bytes


class Buffers:
    """Pool of arrays. An array returns to the pool when no view of it is referenced any more.

    The pool grows to the highest use of memory and keeps that size until ``release``. Thread-safe.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def lend(self, nbytes: int) -> Bytes:
        """Return an uninitialised array [nbytes] uint8."""
        try:
            owner = self._free[nbytes].pop()
        except IndexError:
            # numpy puts large arrays on huge pages if Linux has them on request (madvise). torch
            # does not. So sockets, copies and digests of some hundred MiB miss the TLB less.
            owner = torch.as_tensor(np.empty(nbytes, np.uint8))
        # numpy lets a view of a view refer to the owner directly if the owner is an array. The
        # owner is a tensor so that every view refers to ``lent``.
        lent: Bytes = owner.numpy()
        weakref.finalize(lent, self._free[nbytes].append, owner).atexit = False
        return lent

    def release(self) -> None:
        """Free idle arrays now and lent ones on return."""
        self._free = defaultdict(list)  # lent arrays return to the old, unreferenced lists

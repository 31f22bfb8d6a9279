"""Pool of reusable memory: the first touch of a page costs more than copying into it."""

import weakref
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from offbeat.weight_sync.chunks import Bytes


class Buffers:
    """Pool of arrays; an array returns to the pool when no view of it is referenced any more.

    The pool grows to the most memory that was ever in use at once, until ``release``. Thread-safe.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def lend(self, nbytes: int) -> Bytes:
        """Return an uninitialised array [nbytes] uint8."""
        try:
            owner = self._free[nbytes].pop()
        except IndexError:
            # Large arrays of numpy lie on huge pages where Linux gives them on request (madvise),
            # torch's do not: sockets, copies and digests of some hundred MiB miss the TLB less.
            owner = torch.as_tensor(np.empty(nbytes, np.uint8))
        # numpy lets a view of a view refer to the owner directly, unless that is no array: so every
        # view refers to ``lent``, which is why the owner is a tensor.
        lent: Bytes = owner.numpy()
        weakref.finalize(lent, self._free[nbytes].append, owner).atexit = False
        return lent

    def release(self) -> None:
        """Free what is not lent, and what is lent as soon as it returns."""
        self._free = defaultdict(list)  # what returns goes to the lists of before, which nobody has

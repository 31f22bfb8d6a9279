"""The sending end of weight sync where no rank holds all weights: they are made whole as they are sent."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from torch import Tensor

from offbeat.weight_sync.chunks import Bytes, pack, walk
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.manifest import Manifest, TensorMeta, plan

Named = Callable[[], Iterator[tuple[str, Tensor]]]


class GatheredSource:
    """Packs weights that all ranks go through together; a chunk's worth is whole at a time.

    The first rank draws ``chunks``, at the same time all others ``take_part``.
    """

    def __init__(
        self,
        metas: Iterable[tuple[str, tuple[int, ...], str]],
        named: Named,
        chunk_bytes: int,
        policy: WirePolicy | None = None,
    ) -> None:
        """Lay them out.

        Args:
            metas: Name, shape and type of every weight, in the order of ``named``.
            named: Goes through the whole weights, on all ranks together.
            chunk_bytes: Bound of a chunk.
            policy: In which types they travel.
        """
        wire, self._named = policy or WirePolicy(), named
        self.manifest: Manifest = plan(
            (TensorMeta(name, shape, wire(name, held), held) for name, shape, held in metas),
            chunk_bytes,
        )

    def chunks(
        self, room: Callable[[int, int], Bytes] | None = None
    ) -> Iterator[tuple[Bytes, str]]:
        """Each chunk's bytes with their digest: a snapshot, made when the chunk is drawn.

        Args:
            room: ``(chunk index, bytes)`` -> where it is to be packed; new memory unless told.
        """
        weights = self._named()
        for chunk in walk(self.manifest):
            tensors = dict(next(weights) for _ in chunk.specs)
            into = room(chunk.index, chunk.nbytes) if room else np.empty(chunk.nbytes, np.uint8)
            yield into, pack(chunk, tensors, into)

    def take_part(self) -> None:
        """What the other ranks do while the first draws all chunks."""
        for _ in self._named():
            pass

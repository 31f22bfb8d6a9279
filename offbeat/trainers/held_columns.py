"""Group columns of a call. A rank receives them with the call or ahead of it.

Does not import torch, because the stub and the controller process import it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.messages.fences import Fence
from offbeat.trainers.errors import ColumnsMissing
from offbeat.transfer_queue.schema import Columns

if TYPE_CHECKING:
    from tensordict import TensorDictBase

Places = Sequence[Sequence[tuple[int, int]]]
"""Location of each group's columns: ``(payload, index in it)``, in the order written."""


class HeldColumns:
    """Buffer for columns that arrive ahead of their call.

    It holds the columns of at most one call.
    """

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._payloads = tuple[Sequence[Columns], ...]()

    def put(self, fence: Fence, number: int, payloads: tuple[Sequence[Columns], ...]) -> None:
        """Keep the payloads of call ``number`` of this controller.

        Each controller counts from 1.
        """
        self._key, self._payloads = (fence.incarnation, number), payloads

    def take(self, fence: Fence, number: int) -> tuple[Sequence[Columns], ...] | None:
        """Remove and return the payloads of that call, or None if they did not arrive."""
        arrived, payloads = self._key == (fence.incarnation, number), self._payloads
        self._key, self._payloads = None, ()
        return payloads if arrived else None


class MissingColumns:
    """Placeholder for a chunk without its columns, which did not arrive. Reading it raises."""

    def __init__(self, rank: int, during: str) -> None:
        self._rank, self._during = rank, during

    def __len__(self) -> int:
        raise ColumnsMissing(self._rank, self._during)

    def unbind(self, _dim: int) -> NoReturn:
        """Raise: reading a chunk calls this method."""
        raise ColumnsMissing(self._rank, self._during)


class NumpyChunk:
    """Chunk of a trainer that computes without torch."""

    def __init__(self, groups: Sequence[Columns]) -> None:
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def unbind(self, _dim: int) -> Sequence[Columns]:
        """Return the columns of each group."""
        return self._groups


def merge_columns(places: Places, payloads: Sequence[Sequence[Columns]]) -> list[Columns]:
    """Return the columns of each group, merged from all payloads that contain some of them."""
    groups = list[Columns]()
    for group in places:
        columns: dict[str, NDArray[np.generic]] = {}
        for payload, index in group:
            columns |= payloads[payload][index]
        groups.append(columns)
    return groups


def read_groups(chunk: "TensorDictBase") -> list[Columns]:
    """Return the columns of each group of a chunk as read-only numpy views.

    The columns may be in memory that other processes read. Tensors could not be read-only, so these
    are numpy arrays.

    Raises:
        ColumnsMissing: The columns did not arrive.
    """
    groups = cast("Sequence[Any]", chunk.unbind(0))  # tensordict is not fully typed
    return [{name: _view(tensor) for name, tensor in group.items()} for group in groups]


def _view(tensor: Any) -> NDArray[Any]:  # noqa: ANN401 -- this module loads no torch
    view: NDArray[Any] = np.asarray(tensor).view()
    view.flags.writeable = False
    return view

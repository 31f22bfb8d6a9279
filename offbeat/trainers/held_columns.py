"""The columns of the groups that a rank is given: with a call, or ahead of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.trainers.errors import ColumnsMissing
from offbeat.transfer_queue.schema import Columns

Places = Sequence[Sequence[tuple[int, int]]]
"""For each group, where its columns are: ``(payload, index in it)``, in the order written."""


class HeldColumns:
    """The columns that were sent ahead of the call they belong to: those of one call at most."""

    def __init__(self) -> None:
        self._number, self._payloads = 0, tuple[Sequence[Columns], ...]()

    def put(self, number: int, payloads: tuple[Sequence[Columns], ...]) -> None:
        self._number, self._payloads = number, payloads

    def take(self, number: int) -> tuple[Sequence[Columns], ...] | None:
        """The payloads of this number, once; None when they did not arrive."""
        arrived, payloads = self._number == number, self._payloads
        self._number, self._payloads = 0, ()
        return payloads if arrived else None


class MissingColumns(Sequence[Columns]):
    """The groups of a call whose columns did not arrive: reading them raises."""

    def __init__(self, rank: int, during: str) -> None:
        self._rank, self._during = rank, during

    def __len__(self) -> int:
        raise ColumnsMissing(self._rank, self._during)

    def __getitem__(self, place: object) -> Any:  # noqa: ANN401 -- it has none
        raise ColumnsMissing(self._rank, self._during)


def merged(places: Places, payloads: Sequence[Sequence[Columns]]) -> list[Columns]:
    """The columns of each group, from all the places they are in."""
    groups = list[Columns]()
    for group in places:
        columns: dict[str, NDArray[np.generic]] = {}
        for payload, index in group:
            columns |= payloads[payload][index]
        groups.append(columns)
    return groups

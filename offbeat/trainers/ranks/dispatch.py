"""Which groups of a chunk each data-parallel rank trains, and which rank is which replica. Pure.

The same function deals in production and in tests: a test that feeds every rank everything would
not see half of the mistakes that are made here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def shares(tokens: Mapping[int, int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Deal groups to ranks so that all have about as many tokens; a group is never split.

    The heaviest group first, each to the rank with the fewest tokens so far; of equal ranks to the
    lowest, of equal groups the one of the lowest number. So no two ranks are further apart than the
    heaviest group, and no rank is without a group while there are enough of them. It depends on the
    numbers and their tokens alone, not on the order they come in.

    Args:
        tokens: Of each group, by any number that names it; a group of none counts as one token.
        ranks: To deal to, 1 or more.

    Returns:
        The numbers of each rank's groups, in rising order.
    """
    dealt, loads = [list[int]() for _ in range(ranks)], [0] * ranks
    for group in sorted(tokens, key=lambda each: (-tokens[each], each)):
        lightest = loads.index(min(loads))
        dealt[lightest].append(group)
        loads[lightest] += max(1, tokens[group])
    return tuple(tuple(sorted(each)) for each in dealt)


def evened(microbatches: Sequence[T], count: int, padding: T) -> list[T]:
    """The microbatches, and as much padding behind them as makes ``count``.

    Ranks that shard one model compute together: whoever has fewer microbatches, or none at all,
    computes padding, whose gradient is zero, until the others are done too.
    """
    if len(microbatches) > count:
        raise ValueError(f"{len(microbatches)} microbatches cannot be evened to {count}")
    return [*microbatches, *[padding] * (count - len(microbatches))]


@dataclass(frozen=True, slots=True)
class Replicas:
    """Which ranks of a world hold a copy of the model together.

    Ranks are numbered with the tensor-parallel place fastest, then the data-parallel one, then the
    pipeline stage.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Of the whole world."""
        return self.data * self.tensor * self.pipeline

    def share_of(self, rank: int) -> int:
        """Which share of the data a rank trains."""
        return rank // self.tensor % self.data

    @property
    def leaders(self) -> tuple[int, ...]:
        """One rank a replica, in order of the shares: its answers stand for its twins' too."""
        first_of_last_stage = (self.pipeline - 1) * self.data * self.tensor
        return tuple(first_of_last_stage + share * self.tensor for share in range(self.data))

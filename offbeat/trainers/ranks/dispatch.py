"""Assignment of the groups of a chunk to data-parallel ranks, and of ranks to replicas. Pure.

Production and tests use the same function. A test that feeds all groups to every rank would miss
half of the possible mistakes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self, TypeVar

from offbeat.config.limits import find_encoder, trainer_replicas
from offbeat.config.sections.trainer_base import AnyTrainerConfig, ModelTrainerConfig

T = TypeVar("T")


def shares(tokens: Mapping[int, int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Assign groups to ranks so that all have about as many tokens. A group is never split.

    Groups are assigned from the largest to the smallest, each to the rank with the fewest tokens so
    far. Ties go to the lowest rank and the group with the lowest number. So two ranks differ by at
    most the largest group, and every rank has a group if there are enough. The result depends only
    on the numbers and their tokens, not on their order.

    Args:
        tokens: Tokens of each group, by a number that identifies it. A group of 0 tokens counts as
            one token.
        ranks: Number of ranks, 1 or more.

    Returns:
        For each rank, the numbers of its groups in ascending order.
    """
    assigned, loads = [list[int]() for _ in range(ranks)], [0] * ranks
    for group in sorted(tokens, key=lambda each: (-tokens[each], each)):
        lightest = loads.index(min(loads))
        assigned[lightest].append(group)
        loads[lightest] += max(1, tokens[group])
    return tuple(tuple(sorted(each)) for each in assigned)


def minibatch_shares(
    tokens: Mapping[int, int], minibatches: Mapping[int, int], ranks: int
) -> tuple[tuple[int, ...], ...]:
    """Assign groups to ranks like ``shares``, each minibatch by itself.

    Ranks train a minibatch together, so a rank with few of its tokens would wait for the others.

    Args:
        tokens: Tokens of each group, by a number that identifies it.
        minibatches: Minibatch of each group, by the same number.
        ranks: Number of ranks, 1 or more.
    """
    parts = [
        shares({group: tokens[group] for group in tokens if minibatches[group] == each}, ranks)
        for each in sorted(set(minibatches.values()))
    ]
    return tuple(
        tuple(sorted(chain.from_iterable(part[rank] for part in parts))) for rank in range(ranks)
    )


def pad_microbatches(microbatches: Sequence[T], count: int, padding: T) -> list[T]:
    """Return ``count`` microbatches: the given ones, followed by padding.

    Ranks that shard one model compute together. A rank with fewer microbatches, or none, computes
    padding until the others are done too. The gradient of padding is zero.
    """
    if len(microbatches) > count:
        raise ValueError(f"{len(microbatches)} microbatches cannot be padded to {count}")
    return [*microbatches, *[padding] * (count - len(microbatches))]


@dataclass(frozen=True, slots=True)
class Replicas:
    """Partition of a world into replicas: sets of ranks that hold one copy of the model together.

    In the numbering of ranks, the tensor-parallel place varies fastest, then the context-parallel
    place, then the data-parallel place, then the pipeline stage. Encoder ranks, which hold no
    language model, follow. Among them, the tensor-parallel place varies fastest.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    encoders: int = 0  # sets of encoder ranks that hold one copy of the vision tower together
    encoder_tensor: int = 1  # encoder ranks that divide the matrices of such a set

    @classmethod
    def of(cls, trainer: AnyTrainerConfig) -> Self:
        """Return the replicas of a recipe's trainer."""
        data, encoder = trainer_replicas(trainer), find_encoder(trainer)
        encoders = 0 if encoder is None else encoder.data_parallel
        encoder_tensor = 1 if encoder is None else encoder.tensor_parallel
        if not isinstance(trainer, ModelTrainerConfig):
            return cls(data, encoders=encoders, encoder_tensor=encoder_tensor)
        return cls(
            data,
            trainer.tensor_parallel,
            trainer.stages,
            trainer.ranks_of_row,
            encoders,
            encoder_tensor,
        )

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the whole world."""
        return self.language_ranks + self.encoders * self.encoder_tensor

    @property
    def language_ranks(self) -> int:
        """Return the number of ranks of the language model."""
        return self.data * self.neighbours * self.pipeline

    @property
    def neighbours(self) -> int:
        """Return the number of ranks of one replica in one stage. Their numbers are consecutive."""
        return self.tensor * self.context

    def find_share(self, rank: int) -> int:
        """Return the index of the data share that a rank of the language model trains."""
        return rank // self.neighbours % self.data

    def list_shares(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the data shares whose groups ``rank`` gets, in ascending order.

        A language rank gets its own share. The encoder ranks of set ``e`` get ``data / encoders``
        shares, from ``e * data / encoders`` on, because they encode the pictures of these groups.
        """
        if rank < self.language_ranks:
            return (self.find_share(rank),)
        encoder = (rank - self.language_ranks) // self.encoder_tensor
        lanes = self.data // self.encoders
        return tuple(range(encoder * lanes, (encoder + 1) * lanes))

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return the rank of each replica that replies for it, in order of the shares."""
        first_of_last_stage = (self.pipeline - 1) * self.data * self.neighbours
        return tuple(first_of_last_stage + share * self.neighbours for share in range(self.data))

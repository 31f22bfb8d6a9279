"""Ranks of the language model and of its vision tower, and who encodes for whom. Pure."""

import enum
from dataclasses import dataclass


class Side(enum.StrEnum):
    """Part of an image-text model that a rank holds."""

    LANGUAGE = "language"  # decoder and output head
    TOWER = "tower"  # everything else: vision tower and projector


@dataclass(frozen=True, slots=True)
class Grid:
    """A world of language ranks, numbered from 0, and encoder ranks behind them.

    A lane is the language ranks that train the same groups: one rank of the torch trainer, one
    data-parallel replica of the megatron trainer. Encoder rank ``e`` serves lanes ``e * k`` to
    ``e * k + k - 1``, with k = lanes / encoders. Of a lane one rank exchanges messages with it, the
    first of those that embed the lane's tokens.
    """

    lanes: int
    encoders: int
    embedding_ranks: int = 1  # of a lane that embed its tokens; their numbers are consecutive
    stages: int = 1  # pipeline stages of a lane

    @property
    def language_ranks(self) -> int:
        """Return the number of ranks of the language model."""
        return self.lanes * self.embedding_ranks * self.stages

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the world."""
        return self.language_ranks + self.encoders

    def side_of(self, rank: int) -> Side:
        """Return what a rank holds."""
        return Side.LANGUAGE if rank < self.language_ranks else Side.TOWER

    def ranks_of(self, side: Side) -> tuple[int, ...]:
        """Return the ranks that hold a side, the first of which speaks for them."""
        if side is Side.LANGUAGE:
            return tuple(range(self.language_ranks))
        return tuple(range(self.language_ranks, self.ranks))

    def lane_of(self, rank: int) -> int:
        """Return the lane of a rank of the language model."""
        return rank // self.embedding_ranks % self.lanes

    def receiver_of(self, lane: int) -> int:
        """Return the rank of a lane that receives its features and sends their gradients."""
        return lane * self.embedding_ranks

    def lanes_of(self, rank: int) -> tuple[int, ...]:
        """Return the lanes that an encoder rank serves, in their order."""
        each, encoder = self.lanes // self.encoders, rank - self.language_ranks
        return tuple(range(encoder * each, (encoder + 1) * each))

    def encoder_of(self, lane: int) -> int:
        """Return the rank that encodes for a lane."""
        return self.language_ranks + lane // (self.lanes // self.encoders)

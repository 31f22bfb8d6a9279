"""Ranks of the language model and of its vision tower, and who encodes for whom. Pure."""

import enum
from dataclasses import dataclass


class Side(enum.StrEnum):
    """Part of an image-text model that a rank holds."""

    LANGUAGE = "language"  # decoder and output head
    TOWER = "tower"  # everything else: vision tower and projector


@dataclass(frozen=True, slots=True)
class Grid:
    """A world of language ranks 0 to L - 1, which are the lanes, and encoder ranks from L on.

    Encoder rank ``e`` serves lanes ``e * k`` to ``e * k + k - 1``, with k = lanes / encoders.
    """

    lanes: int
    encoders: int

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the world."""
        return self.lanes + self.encoders

    def side_of(self, rank: int) -> Side:
        """Return what a rank holds."""
        return Side.LANGUAGE if rank < self.lanes else Side.TOWER

    def ranks_of(self, side: Side) -> tuple[int, ...]:
        """Return the ranks that hold a side, the first of which speaks for them."""
        if side is Side.LANGUAGE:
            return tuple(range(self.lanes))
        return tuple(range(self.lanes, self.ranks))

    def lanes_of(self, rank: int) -> tuple[int, ...]:
        """Return the lanes that an encoder rank serves, in their order."""
        each, encoder = self.lanes // self.encoders, rank - self.lanes
        return tuple(range(encoder * each, (encoder + 1) * each))

    def encoder_of(self, lane: int) -> int:
        """Return the rank that encodes for a lane."""
        return self.lanes + lane // (self.lanes // self.encoders)

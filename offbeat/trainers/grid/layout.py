"""Ranks of the language model and of its vision tower, and who encodes for whom. Pure."""

import enum
from dataclasses import dataclass

from offbeat.config.sections.trainer import TorchTrainerConfig


class Side(enum.StrEnum):
    """Part of an image-text model that a rank holds."""

    LANGUAGE = "language"  # decoder and output head
    TOWER = "tower"  # everything else: vision tower and projector


@dataclass(frozen=True, slots=True)
class Grid:
    """A world of language ranks, numbered from 0, and encoder ranks behind them.

    A lane is the language ranks that train the same groups: a data-parallel replica. An encoder is the encoder ranks that hold one copy
    of the tower's matrices together, and encode the same pictures. Encoder ``e`` serves lanes ``e * k``
    to ``e * k + k - 1``, with k = lanes / encoders. One rank of each exchanges messages with the other:
    of a lane the first of those that embed its tokens, of an encoder its first.
    """

    lanes: int
    encoders: int
    encoder_tensor: int = 1  # ranks of an encoder; their numbers are consecutive
    embedding_ranks: int = 1  # of a lane that embed its tokens; their numbers are consecutive
    stages: int = 1  # pipeline stages of a lane
    dtensor_ranks: int = 1  # of a lane that divide its matrices as DTensors: of the torch trainer

    @property
    def language_ranks(self) -> int:
        """Return the number of ranks of the language model."""
        return self.lanes * self.embedding_ranks * self.stages

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the world."""
        return self.language_ranks + self.encoders * self.encoder_tensor

    def side_of(self, rank: int) -> Side:
        """Return what a rank holds."""
        return Side.LANGUAGE if rank < self.language_ranks else Side.TOWER

    def ranks_of(self, side: Side) -> tuple[int, ...]:
        """Return the ranks that hold a side; the first one is their leader."""
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
        each, encoder = self.lanes // self.encoders, self._encoder(rank)
        return tuple(range(encoder * each, (encoder + 1) * each))

    def encoder_of(self, lane: int) -> int:
        """Return the rank that sends a lane's features and receives their gradients."""
        encoder = lane // (self.lanes // self.encoders)
        return self.language_ranks + encoder * self.encoder_tensor

    def tensor_ranks_of(self, side: Side) -> int:
        """Return the number of ranks that divide the matrices of a side as DTensors."""
        return self.encoder_tensor if side is Side.TOWER else self.dtensor_ranks

    def sender_of(self, rank: int) -> int:
        """Return the encoder rank that exchanges messages for an encoder rank's encoder."""
        return self.language_ranks + self._encoder(rank) * self.encoder_tensor

    def _encoder(self, rank: int) -> int:
        return (rank - self.language_ranks) // self.encoder_tensor


def torch_grid(trainer: TorchTrainerConfig) -> Grid:
    """Return the ranks of both sides of a recipe of the torch trainer."""
    encoder = trainer.encoder
    assert encoder is not None  # noqa: S101 -- without one no rank holds a side alone
    return Grid(
        lanes=trainer.data_parallel,
        encoders=encoder.data_parallel,
        encoder_tensor=encoder.tensor_parallel,
        embedding_ranks=trainer.tensor_parallel,
        dtensor_ranks=trainer.tensor_parallel,
    )

"""Ranks of the language model and of its vision tower, and the encoder of each lane. Pure."""

from dataclasses import dataclass, replace

from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.config.sections.trainer_base import ModelTrainerConfig
from offbeat.trainers.ranks.dispatch import Replicas
from offbeat.trainers.sides import Side


@dataclass(frozen=True, slots=True)
class Grid(Replicas):
    """World of language ranks, numbered from 0, followed by encoder ranks.

    A lane is the language ranks that train the same groups: a data-parallel replica. An encoder is the
    encoder ranks that together hold one copy of the tower's matrices, and encode the same pictures.
    Encoder ``e`` serves lanes ``e * k`` to ``e * k + k - 1``, with k = lanes / encoders. One rank
    of a lane and one rank of an encoder exchange messages: the lane's first rank that embeds
    tokens, and the encoder's first rank.
    """

    dtensor_ranks: int = 1  # ranks of a lane that divide matrices as DTensors (torch trainer)

    def find_side(self, rank: int) -> Side:
        """Return the side that a rank holds."""
        return Side.LANGUAGE if rank < self.language_ranks else Side.TOWER

    def list_ranks(self, side: Side) -> tuple[int, ...]:
        """Return the ranks that hold a side, beginning with their leader."""
        if side is Side.LANGUAGE:
            return tuple(range(self.language_ranks))
        return tuple(range(self.language_ranks, self.ranks))

    def find_receiver(self, lane: int) -> int:
        """Return the rank of a lane that receives its features and sends their gradients."""
        return lane * self.neighbours

    def find_encoder(self, lane: int) -> int:
        """Return the rank that sends a lane's features and receives their gradients."""
        encoder = lane // (self.data // self.encoders)
        return self.language_ranks + encoder * self.encoder_tensor

    def find_sender(self, rank: int) -> int:
        """Return the encoder rank that exchanges messages for an encoder rank's encoder."""
        return rank - (rank - self.language_ranks) % self.encoder_tensor

    def count_tensor_ranks(self, side: Side) -> int:
        """Return the number of ranks that divide the matrices of a side as DTensors."""
        return self.encoder_tensor if side is Side.TOWER else self.dtensor_ranks


def side_grid(trainer: ModelTrainerConfig) -> Grid:
    """Return the ranks of both sides of a recipe with ``trainer.encoder``."""
    divides = isinstance(trainer, TorchTrainerConfig)
    return replace(Grid.of(trainer), dtensor_ranks=trainer.tensor_parallel if divides else 1)

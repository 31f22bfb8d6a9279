"""Groups of a test as the chunk that a trainer receives."""

from collections.abc import Sequence
from typing import TypeVar

from tensordict import TensorDictBase

from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.tensordict_codec import build_chunk

A = TypeVar("A")


def in_chunk(step: tuple[Sequence[Columns], A]) -> tuple[TensorDictBase, A]:
    """Return a step's groups as a chunk, with their advantages."""
    groups, advantages = step
    return build_chunk(groups), advantages

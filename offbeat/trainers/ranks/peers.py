"""What one rank says to the others of its world, beside the tensors that a library reduces."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

import msgspec

from offbeat.messages.failures import OffbeatError

T = TypeVar("T")


class PeerFailed(OffbeatError):
    """This rank could go on; another one has failed, and says itself why."""

    def __init__(self, rank: int, failed: int, during: str) -> None:
        super().__init__(rank, failed, during)
        self.rank, self.failed, self.during = rank, failed, during

    def __str__(self) -> str:
        return f"trainer rank {self.rank} gave up in {self.during}: rank {self.failed} failed"


class WorldBroken(OffbeatError):
    """The ranks cannot reach each other any more: only new processes can go on."""

    def __init__(self, rank: int, during: str, detail: str) -> None:
        super().__init__(rank, during, detail)
        self.rank, self.during, self.detail = rank, during, detail

    def __str__(self) -> str:
        return f"trainer rank {self.rank} lost the others in {self.during}: {self.detail}"


def line_of(error: Exception) -> str:
    """An error in one short line: gloo's and NCCL's own go on."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class Peers(Protocol):
    """The ranks of a world, as one of them sees them. All of them make the same calls, in order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest of each value on any rank."""
        ...

    def gathered(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> list[T]:
        """Return the values of all ranks, in order of the ranks: the same list on each of them.

        ``decoder`` names their type: they travel as msgpack.
        """
        ...

    def told(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> T:
        """Return the first rank's value; ``decoder`` names its type."""
        ...

    def are_lost(self, error: Exception) -> bool:
        """It was raised because another rank is gone, or too late."""
        ...


class SingleRank:
    """A world of one rank."""

    rank = 0
    size = 1

    def most(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def gathered(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> list[T]:
        del decoder
        return [value]

    def told(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> T:
        del decoder
        return value

    def are_lost(self, error: Exception) -> bool:
        del error
        return False


def agreed_most(peers: Peers, during: str, value: int, failure: Exception | None) -> int:
    """The largest value of any rank, if none of them has failed. All ranks call it together.

    So a rank that cannot take part says so before the others wait for it.

    Raises:
        Exception: ``failure``, on the rank that has it.
        PeerFailed: On the others.
    """
    most, failed = peers.most([value, 0 if failure is None else peers.rank + 1])
    if failure is not None:
        raise failure
    if failed:
        raise PeerFailed(peers.rank, failed - 1, during)
    return most


def together(peers: Peers, during: str, work: Callable[[], T]) -> T:
    """Do what may fail on any rank; all of them go on, or none. All ranks call it together.

    Raises:
        Exception: What ``work`` raised, on the rank where it did.
        PeerFailed: On the others.
    """
    try:
        done, failure = work(), None
    except Exception as error:
        if peers.size == 1 or peers.are_lost(error):
            raise
        done, failure = None, error
    agreed_most(peers, during, 0, failure)
    return cast("T", done)

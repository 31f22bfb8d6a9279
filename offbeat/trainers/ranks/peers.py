"""Collectives between the ranks of a world for small typed values, not a library's tensors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar, cast

import msgspec

from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import first_line

T = TypeVar("T")


class PeerFailed(OffbeatError):
    """Another rank failed and raises the cause. This rank stopped too.

    Fix: correct the failure of the named rank.
    """

    rank: int
    failed: int
    during: str

    def __str__(self) -> str:
        return f"trainer rank {self.rank} stopped in {self.during}: rank {self.failed} failed"


class WorldBroken(OffbeatError):
    """The ranks cannot reach each other any more. Only new processes can continue.

    Fix: none: all ranks restart within ``trainer.restart_budget``.
    """

    rank: int
    during: str
    detail: str

    def __str__(self) -> str:
        return f"trainer rank {self.rank} lost the others in {self.during}: {self.detail}"


def shorten_error(error: Exception) -> str:
    """Return an error in one short line. Texts of gloo and NCCL have many lines."""
    return first_line(error)[:200]


class Peers(Protocol):
    """The ranks of a world, seen from one rank. All must make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def timeout_s(self) -> float:
        """Return how long a collective waits for a rank.

        Process groups of only some ranks use this time, too.
        """
        ...

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise maximum of ``values`` over all ranks."""
        ...

    def all_gather(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> list[T]:
        """Return the values of all ranks, in rank order: the same list on each rank.

        ``decoder`` is a decoder for the type of these values. They are sent as msgpack.
        """
        ...

    def broadcast(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> T:
        """Return the first rank's value. ``decoder`` is a decoder for the type of this value."""
        ...

    def are_lost(self, error: Exception) -> bool:
        """Return whether ``error`` was raised because another rank is gone or too late."""
        ...


class SingleRank:
    """A world of one rank."""

    rank = 0
    size = 1
    timeout_s = 1800.0  # it never waits

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def all_gather(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> list[T]:
        del decoder
        return [value]

    def broadcast(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> T:
        del decoder
        return value

    def are_lost(self, error: Exception) -> bool:
        del error
        return False


def all_reduce_max_or_fail(
    peers: Peers, during: str, values: Sequence[int], failure: Exception | None
) -> list[int]:
    """Return the elementwise maximum over all ranks, if none of them failed.

    All ranks must call it. A rank that cannot continue reports its failure here, before the others
    wait for it.

    Raises:
        Exception: ``failure``, on the rank that has it.
        PeerFailed: On the other ranks.
    """
    *most, failed = peers.all_reduce_max([*values, 0 if failure is None else peers.rank + 1])
    if failure is not None:
        raise failure
    if failed:
        raise PeerFailed(peers.rank, failed - 1, during)
    return most


def run_on_all_ranks(peers: Peers, during: str, work: Callable[[], T]) -> T:
    """Run ``work``, which may fail on any rank.

    If it fails on one rank, this raises on all ranks. All ranks must call it.

    Raises:
        Exception: The error of ``work``, on the rank that raised it.
        PeerFailed: On the other ranks.
    """
    done, _ = run_and_reduce_max(peers, during, lambda: (work(), 0))
    return done


def run_and_reduce_max(
    peers: Peers, during: str, work: Callable[[], tuple[T, int]]
) -> tuple[T, int]:
    """Run ``work`` like ``run_on_all_ranks``. Return its value, and the maximum of its number."""
    try:
        (done, value), failure = work(), None
    except Exception as error:
        if peers.size == 1 or peers.are_lost(error):
            raise
        done, value, failure = None, 0, error
    [most] = all_reduce_max_or_fail(peers, during, [value], failure)
    return cast("T", done), most


def write_on_first_rank(
    peers: Peers, values: Iterable[T], write: Callable[[Iterator[T]], None]
) -> None:
    """Export values on rank 0 while all ranks gather them. All ranks must call it.

    If ``write`` stops early, the remaining values are gathered and dropped, because the other ranks
    wait in their collectives.

    Raises:
        Exception: The error of ``write``, on rank 0.
        PeerFailed: On the other ranks.
    """
    gathered = (each for each in values)  # ends if a collective fails; the rest is dropped

    def write_or_gather() -> None:
        try:
            if peers.rank == 0:
                write(gathered)
        finally:
            for _ in gathered:
                pass

    run_on_all_ranks(peers, "the export", write_or_gather)

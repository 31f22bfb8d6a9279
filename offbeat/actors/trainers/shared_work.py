"""What the first rank has all ranks do on the files of a checkpoint, each its part, while they wait for it.

The first one leads: it gives an order, all carry it out, and all hear how it went. The others follow,
until it says that the whole is done. What fails anywhere fails on the first rank; what the first rank
makes of it, it says at the end, and then it is the same for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

from offbeat.actors.trainers.checkpoint_manifest import (
    CheckpointCorrupt,
    FileRecord,
    describe,
    verify,
)
from offbeat.actors.trainers.peers import PeerFailed, Peers

T = TypeVar("T")
Write = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class _Write:
    directory: Path


@dataclass(frozen=True, slots=True)
class _Describe:
    directory: Path
    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Verify:
    directory: Path
    files: Sequence[FileRecord]


@dataclass(frozen=True, slots=True)
class _Done:
    failed: bool
    answer: Any = None


@dataclass(frozen=True, slots=True)
class _Failure:
    """Of one rank, as the others hear of it."""

    text: str
    corrupt: CheckpointCorrupt | None  # a file that was read, and is not what was written
    by_other: bool  # this rank only heard of it


_Order = _Write | _Describe | _Verify


class SharedWork:
    """One rank's part in it. Of one rank alone, it is all of it."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._write: Write | None = None  # what all are to write, if they are asked to

    def together(self, during: str, lead: Callable[[], T], write: Write | None = None) -> T:
        """The answer of ``lead``, which runs on the first rank, and gives orders through this object.

        All ranks call it, with the same ``write`` of their own.

        Raises:
            Exception: What ``lead`` raised, on the first rank; what failed on this one, on another.
            PeerFailed: On the others.
        """
        self._write = write
        if self._peers.rank:
            return self._follow(during)
        try:
            answer = lead()
        except Exception as error:
            if not self._peers.are_lost(error):
                self._peers.told(_Done(failed=True))
            raise
        self._peers.told(_Done(failed=False, answer=answer))
        return answer

    def write(self, directory: Path) -> None:
        """Order: all put their files into this directory."""
        self._lead(_Write(directory))

    def describe(self, directory: Path, names: Sequence[str]) -> list[FileRecord]:
        """Order: all digest some of these files."""
        parts: list[Sequence[FileRecord]] = self._lead(_Describe(directory, names))
        return sorted(chain.from_iterable(parts), key=lambda each: each.name)

    def verify(self, directory: Path, files: Sequence[FileRecord]) -> None:
        """Order: all verify some of these files."""
        self._lead(_Verify(directory, files))

    def _follow(self, during: str) -> Any:  # noqa: ANN401 -- the answer of whatever is led
        failure: Exception | None = None
        while not isinstance(order := self._peers.told(cast("_Order | _Done", None)), _Done):
            _, own = self._carry_out(order)
            if not isinstance(order, _Verify):  # what is damaged is skipped, not failed at
                failure = failure or own
        if order.failed:
            raise failure or PeerFailed(self._peers.rank, 0, during)
        return order.answer

    def _lead(self, order: _Order) -> list[Any]:
        """The answers of all ranks.

        Raises:
            OSError: What a rank says it cannot do.
            CheckpointCorrupt: What a rank has found.
            Exception: What failed on this rank.
        """
        self._peers.told(order)
        answers, failure = self._carry_out(order)
        if failure is not None and not isinstance(failure, PeerFailed):
            raise failure
        failed = [(rank, each) for rank, each in enumerate(answers) if isinstance(each, _Failure)]
        for rank, each in sorted(failed, key=lambda pair: pair[1].by_other):
            raise each.corrupt or OSError(f"rank {rank}: {each.text}")
        return answers

    def _carry_out(self, order: _Order) -> tuple[list[Any], Exception | None]:
        """The answers of all ranks, and what failed on this one."""
        answer, failure = None, None
        try:
            answer = self._part_of(order)
        except Exception as error:
            if self._peers.are_lost(error):
                raise
            failure = error
        told = answer if failure is None else _as_told(failure)
        return self._peers.gathered(told), failure

    def _part_of(self, order: _Order) -> tuple[FileRecord, ...]:
        own = slice(self._peers.rank, None, self._peers.size)
        match order:
            case _Write(directory):
                cast("Write", self._write)(directory)
                return ()
            case _Describe(directory, names):
                return describe(directory, names[own])
            case _Verify(directory, files):
                verify(directory, files[own])
                return ()


def _as_told(failure: Exception) -> _Failure:
    corrupt = failure if isinstance(failure, CheckpointCorrupt) else None
    text = str(failure) if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
    return _Failure(text, corrupt, isinstance(failure, PeerFailed))

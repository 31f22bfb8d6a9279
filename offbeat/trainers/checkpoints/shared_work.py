"""What the first rank has all ranks do on the files of a checkpoint, each its part, while they wait for it.

The first one leads: it gives an order, all carry it out, and all hear how it went. The others follow,
until it says that the whole is done. What fails anywhere fails on the first rank; what the first rank
makes of it, it says at the end, and then it is the same for all.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec

from offbeat.trainers.checkpoints.manifest import (
    CheckpointCorrupt,
    FileRecord,
    describe,
    verify,
)
from offbeat.trainers.ranks.peers import PeerFailed, Peers

T = TypeVar("T")
Write = Callable[[Path], None]


class _Write(msgspec.Struct, frozen=True, tag=True):
    directory: str


class _Describe(msgspec.Struct, frozen=True, tag=True):
    directory: str
    names: Sequence[str]


class _Verify(msgspec.Struct, frozen=True, tag=True):
    directory: str
    files: Sequence[FileRecord]


class _Done(msgspec.Struct, frozen=True, tag=True):
    failed: bool
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")  # msgpack's nil


class _Files(msgspec.Struct, frozen=True, tag=True):
    """What one rank has digested; empty of an order that asks for nothing."""

    records: Sequence[FileRecord] = ()


class _Failure(msgspec.Struct, frozen=True, tag=True):
    """A failure of one rank, as the others receive it."""

    text: str
    corrupt: tuple[str, str] | None  # fields of a CheckpointCorrupt: a file that was read
    by_other: bool  # this rank was only notified of it


_Order = _Write | _Describe | _Verify
_ORDERS: Final = msgspec.msgpack.Decoder[_Order | _Done](_Order | _Done)
_ANSWERS: Final = msgspec.msgpack.Decoder[_Files | _Failure](_Files | _Failure)


class SharedWork:
    """One rank's part in it. Of one rank alone, it is all of it."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._write: Write | None = None  # what all are to write, if they are asked to

    def together(
        self,
        during: str,
        lead: Callable[[], T],
        decoder: "msgspec.msgpack.Decoder[T]",
        write: Write | None = None,
    ) -> T:
        """The answer of ``lead``, which runs on the first rank, and gives orders through this object.

        All ranks call it, with the same ``write`` of their own. ``decoder`` names the answer's type.

        Raises:
            Exception: What ``lead`` raised, on the first rank; what failed on this one, on another.
            PeerFailed: On the others.
        """
        self._write = write
        if self._peers.rank:
            return decoder.decode(self._follow(during))
        try:
            answer = lead()
        except Exception as error:
            if not self._peers.are_lost(error):
                self._peers.told(_Done(failed=True), _ORDERS)
            raise
        encoded = msgspec.Raw(msgspec.msgpack.encode(answer))
        self._peers.told(_Done(failed=False, answer=encoded), _ORDERS)
        return answer

    def write(self, directory: Path) -> None:
        """Order: all put their files into this directory."""
        self._lead(_Write(str(directory)))

    def describe(self, directory: Path, names: Sequence[str]) -> list[FileRecord]:
        """Order: all digest some of these files."""
        parts = self._lead(_Describe(str(directory), names))
        records = chain.from_iterable(each.records for each in parts)
        return sorted(records, key=lambda each: each.name)

    def verify(self, directory: Path, files: Sequence[FileRecord]) -> None:
        """Order: all verify some of these files."""
        self._lead(_Verify(str(directory), files))

    def _follow(self, during: str) -> msgspec.Raw:
        """The answer of whatever is led, encoded."""
        failure: Exception | None = None
        while not isinstance(order := self._peers.told(_Done(failed=True), _ORDERS), _Done):
            _, own = self._carry_out(order)
            if not isinstance(order, _Verify):  # what is damaged is skipped, not failed at
                failure = failure or own
        if order.failed:
            raise failure or PeerFailed(self._peers.rank, 0, during)
        return order.answer

    def _lead(self, order: _Order) -> list[_Files]:
        """The answers of all ranks.

        Raises:
            OSError: What a rank says it cannot do.
            CheckpointCorrupt: What a rank has found.
            Exception: What failed on this rank.
        """
        self._peers.told(order, _ORDERS)
        answers, failure = self._carry_out(order)
        if failure is not None and not isinstance(failure, PeerFailed):
            raise failure
        failed = [(rank, each) for rank, each in enumerate(answers) if isinstance(each, _Failure)]
        for rank, each in sorted(failed, key=lambda pair: pair[1].by_other):
            if each.corrupt is not None:
                raise CheckpointCorrupt(*each.corrupt)
            raise OSError(f"rank {rank}: {each.text}")
        return [each for each in answers if isinstance(each, _Files)]

    def _carry_out(self, order: _Order) -> tuple[list[_Files | _Failure], Exception | None]:
        """The answers of all ranks, and what failed on this one."""
        answer, failure = _Files(), None
        try:
            answer = _Files(self._part_of(order))
        except Exception as error:
            if self._peers.are_lost(error):
                raise
            failure = error
        told = answer if failure is None else _as_told(failure)
        return self._peers.gathered(told, _ANSWERS), failure

    def _part_of(self, order: _Order) -> Sequence[FileRecord]:
        own = slice(self._peers.rank, None, self._peers.size)
        match order:
            case _Write(directory):
                cast("Write", self._write)(Path(directory))
                return ()
            case _Describe(directory, names):
                return describe(Path(directory), names[own])
            case _Verify(directory, files):
                verify(Path(directory), files[own])
                return ()


def _as_told(failure: Exception) -> _Failure:
    damaged = isinstance(failure, CheckpointCorrupt)
    corrupt = (failure.file, failure.problem) if damaged else None
    text = str(failure) if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
    return _Failure(text, corrupt, isinstance(failure, PeerFailed))

"""File work of a checkpoint that rank 0 distributes over all ranks.

Rank 0 leads: it broadcasts an order, all ranks carry it out on their share of the files, and all
gather the results. The other ranks follow until rank 0 broadcasts that the work is done. A failure
anywhere is raised on rank 0; the outcome that rank 0 broadcasts at the end is the same for all.
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
    """Files that one rank has digested; empty for an order that returns nothing."""

    records: Sequence[FileRecord] = ()


class _Failure(msgspec.Struct, frozen=True, tag=True):
    """A failure of one rank in the form that the others receive."""

    text: str
    corrupt: tuple[str, str] | None  # fields of a CheckpointCorrupt: a file that was read
    by_other: bool  # this rank was only notified of it


_Order = _Write | _Describe | _Verify
_ORDERS: Final = msgspec.msgpack.Decoder[_Order | _Done](_Order | _Done)
_ANSWERS: Final = msgspec.msgpack.Decoder[_Files | _Failure](_Files | _Failure)


class SharedWork:
    """One rank's share of the work; in a world of one rank, the whole work."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._write: Write | None = None  # this rank's part of a ``_Write`` order

    def run(
        self,
        during: str,
        lead: Callable[[], T],
        decoder: "msgspec.msgpack.Decoder[T]",
        write: Write | None = None,
    ) -> T:
        """Run ``lead`` on rank 0, which gives orders through this object; return its result on all ranks.

        All ranks call it, with their own ``write``. ``decoder`` names the type of the result.

        Raises:
            Exception: What ``lead`` raised, on rank 0; on another rank, what failed there.
            PeerFailed: On the others.
        """
        self._write = write
        if self._peers.rank:
            return decoder.decode(self._follow(during))
        try:
            answer = lead()
        except Exception as error:
            if not self._peers.are_lost(error):
                self._peers.broadcast(_Done(failed=True), _ORDERS)
            raise
        encoded = msgspec.Raw(msgspec.msgpack.encode(answer))
        self._peers.broadcast(_Done(failed=False, answer=encoded), _ORDERS)
        return answer

    def write(self, directory: Path) -> None:
        """Order all ranks to write their files into this directory."""
        self._lead(_Write(str(directory)))

    def describe(self, directory: Path, names: Sequence[str]) -> list[FileRecord]:
        """Order all ranks to digest a share of these files each."""
        parts = self._lead(_Describe(str(directory), names))
        records = chain.from_iterable(each.records for each in parts)
        return sorted(records, key=lambda each: each.name)

    def verify(self, directory: Path, files: Sequence[FileRecord]) -> None:
        """Order all ranks to verify a share of these files each."""
        self._lead(_Verify(str(directory), files))

    def _follow(self, during: str) -> msgspec.Raw:
        """Carry out orders until rank 0 is done; return its encoded result."""
        failure: Exception | None = None
        while not isinstance(order := self._received(), _Done):
            _, own = self._carry_out(order)
            if not isinstance(order, _Verify):  # a damaged checkpoint is skipped, it is no failure
                failure = failure or own
        if order.failed:
            raise failure or PeerFailed(self._peers.rank, 0, during)
        return order.answer

    def _received(self) -> _Order | _Done:
        """Return rank 0's order; on rank 0 itself nobody waits for one."""
        return self._peers.broadcast(_Done(failed=True), _ORDERS)

    def _lead(self, order: _Order) -> list[_Files]:
        """Broadcast an order, carry it out, and return the results of all ranks.

        Raises:
            OSError: A rank could not carry it out.
            CheckpointCorrupt: A rank found a damaged file.
            Exception: This rank failed.
        """
        self._peers.broadcast(order, _ORDERS)
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
        """Carry out this rank's share; return the results of all ranks and this rank's failure."""
        answer, failure = _Files(), None
        try:
            answer = _Files(self._part_of(order))
        except Exception as error:
            if self._peers.are_lost(error):
                raise
            failure = error
        outcome = answer if failure is None else _encoded_failure(failure)
        return self._peers.all_gather(outcome, _ANSWERS), failure

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


def _encoded_failure(failure: Exception) -> _Failure:
    damaged = isinstance(failure, CheckpointCorrupt)
    corrupt = (failure.file, failure.problem) if damaged else None
    text = str(failure) if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
    return _Failure(text, corrupt, isinstance(failure, PeerFailed))

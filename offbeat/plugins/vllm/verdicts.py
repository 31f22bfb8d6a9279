"""Reports of workers about work that runs concurrently with decoding.

A call of vLLM blocks a worker until it returns, so a call only starts long work. Workers report the
end of the work over a pipe of the actor. Workers of the same machine open it by its path. Like the
staging area it has no name in any file system, and ends with the actor.
"""

import asyncio
import os
from typing import Final

import msgspec

from offbeat.weight_sync.errors import SenderGone, TransferFailed, TransferRefused

VERIFIED: Final = "verified"
"""Every chunk has the digest it was sent with, as this worker reads or receives it."""
PREPARED: Final = "prepared"
"""Every tensor is loaded and packed, in the shadow model."""

_LONGEST: Final = 200  # characters of a report: a write of less than PIPE_BUF bytes is atomic
_READ: Final = 1 << 16


class TransferVerdict(msgspec.Struct, frozen=True):
    """Result of one kind of work of a transfer at one worker."""

    epoch: int
    work: str
    worker: int
    refused: tuple[str, str, str] | None = None  # tensor or chunk, actual and expected value
    failed: tuple[int, str, bool] | None = None  # bucket, why, and whether nobody sends it any more


_decode = msgspec.json.Decoder(TransferVerdict).decode


class Verdicts:
    """The actor's end of the pipe of verdicts. One wait at a time, in the order in which work was started."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._rest = b""

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._write}"

    async def of(self, epoch: int, work: str, workers: int) -> None:
        """Wait until ``workers`` workers have done this work.

        Reports of older transfers are dropped.

        Raises:
            TransferRefused: One of them failed; the others may still be at work.
            TransferFailed: The same, and a sender is at fault.
            SenderGone: The same, and nobody sends the release any more.
        """
        done = set[int]()
        while len(done) < workers:
            for verdict in await self._some():
                if (verdict.epoch, verdict.work) != (epoch, work):
                    continue
                if verdict.refused is not None:
                    what, got, want = verdict.refused
                    raise TransferRefused(epoch, what, got, want)
                if verdict.failed is not None:
                    bucket, why, gone = verdict.failed
                    raise (SenderGone if gone else TransferFailed)(epoch, bucket, why)
                done.add(verdict.worker)

    def close(self) -> None:
        """Close the pipe; reports that workers send afterwards are discarded."""
        os.close(self._read)
        os.close(self._write)

    async def _some(self) -> list[TransferVerdict]:
        await _readable(self._read)
        *lines, self._rest = (self._rest + os.read(self._read, _READ)).split(b"\n")
        return [_decode(line) for line in lines]


class VerdictSender:
    """A worker's end of the pipe of verdicts. Any of its threads may report."""

    def __init__(self, path: str, worker: int) -> None:
        self._write, self._worker = os.open(path, os.O_WRONLY | os.O_CLOEXEC), worker

    def done(self, epoch: int, work: str) -> None:
        self._send(TransferVerdict(epoch, work, self._worker))

    def send_refusal(self, epoch: int, work: str, refused: TransferRefused) -> None:
        about = refused.what, refused.got, refused.want
        what, got, want = (said[:_LONGEST] for said in about)
        self._send(TransferVerdict(epoch, work, self._worker, (what, got, want)))

    def send_failure(self, epoch: int, work: str, failure: TransferFailed) -> None:
        why = f"worker {self._worker}: {failure.detail}"[: 3 * _LONGEST]
        about = failure.at, why, isinstance(failure, SenderGone)
        self._send(TransferVerdict(epoch, work, self._worker, failed=about))

    def close(self) -> None:
        os.close(self._write)

    def _send(self, verdict: TransferVerdict) -> None:
        os.write(self._write, msgspec.json.encode(verdict) + b"\n")


async def _readable(file: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(file, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(file)

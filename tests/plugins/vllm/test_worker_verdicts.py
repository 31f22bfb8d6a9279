"""What workers say of work beside decoding, over a pipe."""

import asyncio
from collections.abc import Iterator

import pytest

from offbeat.plugins.vllm.verdicts import PREPARED, VERIFIED, Verdicts, VerdictSender
from offbeat.weight_sync.errors import TransferRefused


@pytest.fixture
def verdicts() -> Iterator[Verdicts]:
    made = Verdicts()
    yield made
    made.close()


@pytest.fixture
def workers(verdicts: Verdicts) -> Iterator[list[VerdictSender]]:
    made = [VerdictSender(verdicts.path, rank) for rank in range(3)]
    yield made
    for each in made:
        each.close()


def test_work_is_done_when_every_worker_has_said_so(
    verdicts: Verdicts, workers: list[VerdictSender]
) -> None:
    async def story() -> None:
        waiting = asyncio.ensure_future(verdicts.of(1, VERIFIED, len(workers)))
        for each in (workers[0], workers[0], workers[2]):
            each.done(1, VERIFIED)
        await asyncio.sleep(0)
        assert not waiting.done()
        workers[1].done(1, VERIFIED)
        await waiting

    asyncio.run(story())


def test_what_was_said_before_somebody_waits_is_heard(
    verdicts: Verdicts, workers: list[VerdictSender]
) -> None:
    for each in workers:
        each.done(1, VERIFIED)
    asyncio.run(verdicts.of(1, VERIFIED, len(workers)))


def test_what_is_said_of_older_transfers_and_other_work_counts_for_nothing(
    verdicts: Verdicts, workers: list[VerdictSender]
) -> None:
    only = workers[0]
    only.send_refusal(1, PREPARED, TransferRefused(1, "a chunk", "torn", "whole"))
    only.done(2, VERIFIED)
    only.done(2, PREPARED)
    asyncio.run(verdicts.of(2, PREPARED, 1))


def test_one_refusal_ends_the_wait_and_says_what_and_where(
    verdicts: Verdicts, workers: list[VerdictSender]
) -> None:
    workers[0].done(1, PREPARED)
    refused = TransferRefused(1, "chunk 3, tensor x, in worker 2", "ValueError no", "loaded")
    workers[2].send_refusal(1, PREPARED, refused)
    with pytest.raises(TransferRefused) as told:
        asyncio.run(verdicts.of(1, PREPARED, 3))
    assert str(told.value) == str(refused)


def test_however_much_is_to_be_said_it_arrives_in_one_piece(
    verdicts: Verdicts, workers: list[VerdictSender]
) -> None:
    long = "\u20ac\n" * 10_000
    for each in workers:
        each.send_refusal(0, VERIFIED, TransferRefused(0, long, long, long))
    workers[1].send_refusal(1, VERIFIED, TransferRefused(1, "digest of chunk 0", long, "a"))
    with pytest.raises(TransferRefused, match="digest of chunk 0"):
        asyncio.run(verdicts.of(1, VERIFIED, 3))


def test_a_wait_that_was_cancelled_leaves_the_pipe_to_the_next_one(
    verdicts: Verdicts, workers: list[VerdictSender]
) -> None:
    async def story() -> None:
        waiting = asyncio.ensure_future(verdicts.of(1, VERIFIED, 3))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        for each in workers:
            each.done(2, VERIFIED)
        await verdicts.of(2, VERIFIED, 3)

    asyncio.run(story())

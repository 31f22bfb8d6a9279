"""Work that may fail on any rank: either all ranks continue, or none."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import msgspec
import pytest
import torch

from offbeat.trainers.parts import shared_digest, weights_digest
from offbeat.trainers.ranks.peers import (
    PeerFailed,
    SingleRank,
    all_reduce_max_or_fail,
    run_on_all_ranks,
    write_on_first_rank,
)

T = TypeVar("T")
RANKS = 3


class PeerLost(Exception):
    """How this world says that another rank is gone."""


class ThreadRank(SingleRank):
    """One of several ranks, each in a thread of this process."""

    size = RANKS

    def __init__(self, rank: int, everybody: Barrier, values: list[Sequence[int]]) -> None:
        self.rank = rank
        self._everybody, self._values = everybody, values

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        self._values[self.rank] = values
        self._everybody.wait(30)
        return [max(each) for each in zip(*self._values, strict=True)]

    def are_lost(self, error: Exception) -> bool:
        return isinstance(error, PeerLost)


def on_all_ranks(work: Callable[[ThreadRank], T]) -> list[T | Exception]:
    """What ``work`` returned or raised, on each rank."""
    everybody, values = Barrier(RANKS), list[Sequence[int]]([()] * RANKS)
    ranks = [ThreadRank(rank, everybody, values) for rank in range(RANKS)]

    def outcome(rank: ThreadRank) -> T | Exception:
        try:
            return work(rank)
        except (ValueError, PeerFailed, PeerLost) as error:
            return error

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(outcome, ranks))


def fails_on(failing: int, error: Exception) -> Callable[[ThreadRank], int]:
    def work(peers: ThreadRank) -> int:
        def own() -> int:
            if peers.rank == failing:
                raise error
            return 10 * peers.rank

        return run_on_all_ranks(peers, "a save", own)

    return work


def test_each_rank_gets_the_result_of_its_own_work() -> None:
    assert on_all_ranks(fails_on(-1, ValueError())) == [0, 10, 20]


@pytest.mark.parametrize("failing", range(RANKS))
def test_where_one_rank_fails_the_others_stop_and_name_it(failing: int) -> None:
    torn = ValueError("torn")
    outcomes = on_all_ranks(fails_on(failing, torn))
    assert outcomes.pop(failing) is torn
    for other in outcomes:
        assert isinstance(other, PeerFailed)
        assert (other.failed, other.during) == (failing, "a save")


def test_a_rank_that_lost_the_others_does_not_wait_for_them() -> None:
    lost = PeerLost()

    def work() -> None:
        raise lost

    alone = ThreadRank(1, Barrier(RANKS), [()] * RANKS)
    with pytest.raises(PeerLost) as raised:
        run_on_all_ranks(alone, "a step", work)
    assert raised.value is lost


def test_the_maximum_is_that_of_all_ranks_unless_one_has_failed() -> None:
    maxima = on_all_ranks(
        lambda peers: all_reduce_max_or_fail(peers, "a step", [peers.rank, -peers.rank], None)
    )
    assert maxima == [[RANKS - 1, 0]] * RANKS
    torn = ValueError("torn")
    first, *others = on_all_ranks(
        lambda peers: all_reduce_max_or_fail(peers, "a step", [], None if peers.rank else torn)
    )
    assert first is torn
    assert [type(other) for other in others] == [PeerFailed] * (RANKS - 1)


def test_only_the_first_rank_hashes_weights_and_all_get_the_digest() -> None:
    gathered = [("a", torch.arange(4.0)), ("b", torch.ones(2))]
    wanted = weights_digest(gathered, "base")

    class Answers(SingleRank):
        """A rank that gets this from the first one."""

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def broadcast(self, value: T, decoder: "msgspec.msgpack.Decoder[T]") -> T:
            return value if self.rank == 0 else decoder.decode(msgspec.msgpack.encode(wanted))

    unreadable = [(name, each.to("meta")) for name, each in gathered]
    assert shared_digest(gathered, Answers(0), "base") == wanted
    others = iter(unreadable)
    assert shared_digest(others, Answers(1), "base") == wanted
    assert not list(others), "a gather needs all ranks"


def test_a_single_rank_raises_what_its_work_raised() -> None:
    def work() -> None:
        raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        run_on_all_ranks(SingleRank(), "a step", work)


@pytest.mark.parametrize("raised", [ValueError("no space"), None])
def test_values_are_written_by_one_rank_and_gathered_by_all_also_if_the_writer_fails(
    raised: Exception | None,
) -> None:
    gathered: list[list[int]] = [[] for _ in range(RANKS)]
    written = list[int]()

    def write(values: Iterator[int]) -> None:
        written.append(next(values))
        if raised is not None:
            raise raised
        written.extend(values)

    def work(peers: ThreadRank) -> None:
        def values() -> Iterator[int]:
            for number in range(5):
                gathered[peers.rank].append(number)
                yield number

        write_on_first_rank(peers, values(), write)

    first, *others = on_all_ranks(work)
    assert gathered == [list(range(5))] * RANKS
    if raised is None:
        assert first is None and others == [None, None] and written == list(range(5))
    else:
        assert first is raised and all(isinstance(each, PeerFailed) for each in others)


def test_a_writer_that_lost_the_others_gathers_no_more() -> None:
    def values() -> Iterator[int]:
        yield 0
        raise PeerLost

    def work(peers: ThreadRank) -> None:
        write_on_first_rank(peers, values(), lambda each: [*each].clear())

    assert all(isinstance(each, PeerLost) for each in on_all_ranks(work))

"""What a call costs, in calls of functions: exact, where a clock would only guess."""

from itertools import count

import msgspec
import pytest
from core_fixtures import LOGPROBS, Queue

from offbeat.queue_service.core import Schema
from tests.support.counted_calls import calls_of


def crowd_of_starved(queue: Queue) -> None:
    for ask in range(500):
        queue.wait(10_000 + ask)
        queue.wait(1, where=(("reward", ">", 9),), client=f"c-{ask}")


def test_a_put_costs_the_same_however_many_waiters_cannot_use_it() -> None:
    few, many = Queue(), Queue()
    few.wait(10_000)
    few.wait(1, where=(("reward", ">", 9),))
    crowd_of_starved(many)
    for queue in (few, many):
        queue.put("warm", tags={"reward": [1, 1]})
    cost = [
        calls_of(lambda queue=queue: queue.put("a", tags={"reward": [1, 1]}))
        for queue in (few, many)
    ]
    assert cost[0] == cost[1]


def test_a_group_is_looked_at_once_by_a_waiter_and_never_again() -> None:
    queue = Queue()
    for i in range(300):
        queue.put(f"g-{i}", tags={"reward": [1, 1]})
    first = calls_of(lambda: queue.wait(1, where=(("reward", ">", 9),)))
    second = calls_of(lambda: queue.wait(1, where=(("reward", ">", 9),)))
    put = calls_of(lambda: queue.put("more", tags={"reward": [1, 1]}))
    assert first > 300 and second < 100 and put < 100


@pytest.mark.parametrize("depth", [10, 3000])
def test_every_step_of_a_group_costs_the_same_at_any_depth(depth: int) -> None:
    queue = Queue()
    for i in range(depth):
        queue.put(f"g-{i}")
    queue.core.release(queue.take(5).id, now=0.0)
    fresh = count()
    lease = queue.take()
    queue.core.ack(lease.id)
    queue.core.clear(lease.receipts)
    put = calls_of(lambda: queue.put(f"n-{next(fresh)}"))
    claim = calls_of(queue.claim)
    give = calls_of(lambda: queue.core.release(2 + 1, now=0.0))
    expire = calls_of(lambda: queue.core.expire(1e9))
    stats = calls_of(lambda: queue.core.stats(0.0))
    assert (put < 60, claim < 40, give < 40, expire < 20, stats < 150) == (True,) * 5


def test_a_put_costs_the_same_for_one_column_as_for_many() -> None:
    wide = tuple(msgspec.structs.replace(LOGPROBS, name=f"c{i}") for i in range(32))
    queue = Queue(schema=Schema(wide))
    cost: list[int] = []
    for columns in (wide[:1], wide):
        queue.put(f"warm-{len(columns)}", columns=columns)
        cost.append(calls_of(lambda columns=columns: queue.put(f"{columns}", columns=columns)))
    assert cost[0] == cost[1]


def test_shadows_of_groups_that_left_from_the_middle_are_swept_out() -> None:
    queue = Queue()
    queue.claim()
    for i in range(2000):
        queue.core.clear([queue.put(f"g-{i}")])
    line = queue.core.partitions["train"].tasks["actor"]
    assert calls_of(lambda: line.take(1, 1, (("reward", ">", 1),))) < 20
    assert queue.claim() is None

import pytest
from core_fixtures import LOGPROBS, TOKENS, Queue

from offbeat.queue_service.core import CapacityGrant, QueueLimits
from offbeat.queue_service.errors import QueueFull, TooLarge


def test_a_put_without_room_is_refused_by_the_name_of_what_is_short_and_changes_nothing() -> None:
    queue = Queue(QueueLimits(max_rows=4, max_bytes=100))
    queue.put("a", rows=3)
    with pytest.raises(QueueFull, match="no room for 2 rows: 3 of 4 are taken") as full:
        queue.put("b", rows=2)
    assert full.value.limit == "rows" and not isinstance(full.value, TooLarge)
    with pytest.raises(QueueFull, match="no room for 91 bytes: 10 of 100"):
        queue.put("b", rows=1, nbytes=91)
    assert queue.core.stats(0.0).groups == 1


def test_a_put_that_can_never_fit_is_refused_at_once_with_limit_and_size() -> None:
    queue = Queue(QueueLimits(max_rows=4, max_bytes=100))
    with pytest.raises(TooLarge, match="5 rows can never fit: the queue holds at most 4"):
        queue.put("a", rows=5)
    with pytest.raises(TooLarge, match="101 bytes"):
        queue.core.wait_to_put(1, 101)


def test_producers_are_let_in_in_order_so_small_puts_never_starve_a_big_one() -> None:
    queue = Queue(QueueLimits(max_rows=4, max_bytes=100))
    held = [queue.put(name, rows=2) for name in "ab"]
    big, small = queue.core.wait_to_put(4, 10), queue.core.wait_to_put(1, 10)
    queue.core.clear(held[:1])
    assert queue.core.settled() == [] and queue.core.stats(0.0).waits == {"rows": 2}
    with pytest.raises(QueueFull):
        queue.put("c", rows=1)
    queue.core.clear(held[1:])
    assert queue.core.settled() == [(big, CapacityGrant(4, 10))]
    queue.core.clear([queue.put("big", rows=4, permit=big)])
    assert queue.core.settled() == [(small, CapacityGrant(1, 10))]


def test_room_that_is_promised_is_nobody_elses_until_it_is_used_or_given_back() -> None:
    queue = Queue(QueueLimits(max_rows=4, max_bytes=100))
    first = queue.put("a", rows=4)
    waiter = queue.core.wait_to_put(3, 10)
    queue.core.clear([first])
    assert queue.core.settled() == [(waiter, CapacityGrant(3, 10))]
    with pytest.raises(QueueFull, match="3 of 4"):
        queue.put("b", rows=2)
    stats = queue.core.stats(0.0)
    assert (stats.rows, stats.promised_rows, stats.promised_bytes) == (0, 3, 10)
    assert queue.core.cancel(waiter) and not queue.core.cancel(waiter)
    queue.put("b", rows=4)


def test_a_dead_producer_holds_up_nobody() -> None:
    queue = Queue(QueueLimits(max_rows=4, max_bytes=100))
    first = queue.put("a", rows=4)
    queue.core.wait_to_put(4, 10, "dead")
    queue.core.wait_to_put(4, 10, "dead")
    alive = queue.core.wait_to_put(2, 10, "alive")
    queue.core.clear([first])
    queue.core.drop_client("dead", now=0.0)
    assert queue.core.settled() == [(alive, CapacityGrant(2, 10))]


def test_a_repeated_put_needs_no_room() -> None:
    queue = Queue(QueueLimits(max_rows=4, max_bytes=100))
    first = queue.put("a", rows=4)
    assert queue.put("a", rows=4) == first


def test_a_newer_attempt_needs_room_for_what_it_is_larger_by() -> None:
    queue = Queue(QueueLimits(max_rows=4, max_bytes=100))
    queue.put("a", 1, rows=3)
    queue.put("a", 2, rows=4)
    assert queue.core.stats(0.0).rows == 4


def test_columns_added_to_a_full_queue_are_taken_and_keep_later_puts_out() -> None:
    queue = Queue(QueueLimits(max_rows=4, max_bytes=20))
    receipt = queue.put("a", columns=(TOKENS,), nbytes=15)
    queue.core.add_columns(receipt, (LOGPROBS,), 15, "more", now=0.0)
    assert queue.core.stats(0.0).nbytes == 30
    with pytest.raises(QueueFull, match="30 of 20"):
        queue.put("b", nbytes=1)

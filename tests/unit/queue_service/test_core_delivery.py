import pytest
from core_fixtures import LOGPROBS, SCHEMA, TOKENS, Queue, names

from offbeat.messages.failures import SchemaError
from offbeat.queue_service.core import Schema
from offbeat.queue_service.errors import LeaseExpired


def test_each_task_gets_every_group_once_oldest_first_also_those_from_before_it_came() -> None:
    queue = Queue()
    for name in "abc":
        queue.put(name)
    assert names(queue.take(2)) == ["a", "b"]
    assert names(queue.take(1)) == ["c"] and queue.claim() is None
    assert names(queue.take(3, task="critic")) == ["a", "b", "c"]


def test_rows_are_consumed_by_the_ack_and_delivered_again_if_it_never_comes() -> None:
    queue = Queue()
    queue.put("a")
    lease = queue.take(now=0.0, lease_s=5.0)
    assert queue.core.next_expiry() == 5.0 and queue.core.expire(4.9) == []
    assert queue.core.expire(5.0) == [lease]
    with pytest.raises(LeaseExpired, match=f"cannot ack lease {lease.id}"):
        queue.core.ack(lease.id)
    again = queue.take(now=6.0)
    assert names(again) == ["a"]
    for _ in range(2):
        queue.core.ack(again.id)
    assert queue.core.expire(100.0) == [] and queue.claim() is None


def test_a_renewed_lease_runs_on() -> None:
    queue = Queue()
    queue.put("a")
    lease = queue.take(now=0.0, lease_s=5.0)
    assert queue.core.renew(lease.id, 5.0, now=4.0).expires_at == 9.0
    assert queue.core.expire(8.0) == [] and queue.core.next_expiry() == 9.0


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan")])
def test_a_lease_of_no_time_is_refused_and_hides_no_other(lease_s: float) -> None:
    queue = Queue()
    for name in "ab":
        queue.put(name)
    lease = queue.take(lease_s=5.0)
    for ask in (queue.claim, queue.wait):
        with pytest.raises(SchemaError, match="'lease_s' is"):
            ask(lease_s=lease_s)
    with pytest.raises(SchemaError, match="'lease_s' is"):
        queue.core.renew(lease.id, lease_s, now=0.0)
    assert queue.core.expire(5.0) == [lease] and queue.core.stats(5.0).leases == 0


def test_groups_given_back_are_next_in_their_old_order() -> None:
    queue = Queue()
    for name in "abcde":
        queue.put(name)
    first, second = queue.take(2), queue.take(2)
    queue.core.release(second.id, now=0.0)
    queue.core.release(first.id, now=0.0)
    assert names(queue.take(5)) == ["a", "b", "c", "d", "e"]


def test_a_group_cleared_while_it_is_leased_leaves_the_lease_and_the_ack_is_fine() -> None:
    queue = Queue()
    first, _ = queue.put("a"), queue.put("b")
    lease = queue.take(2)
    queue.core.clear([first])
    assert queue.core.freed() == ["a/1"], "its memory does not wait for the lease"
    assert names(queue.core.lease(lease.id)) == ["b"]
    queue.core.ack(lease.id)
    assert queue.core.stats(0.0).partitions["train"].tasks["actor"].acked == 1


def test_a_group_rests_until_cleared_unless_the_consumers_are_declared() -> None:
    queue = Queue(schema=Schema(SCHEMA.columns, consumers=("actor", "critic")))
    queue.put("a")
    queue.core.ack(queue.take().id)
    queue.core.ack(queue.take(task="monitor").id)
    assert queue.core.freed() == []
    queue.core.ack(queue.take(task="critic").id)
    assert queue.core.freed() == ["a/1"] and queue.core.stats(0.0).groups == 0
    free = Queue()
    free.put("a")
    free.core.ack(free.take().id)
    assert free.core.stats(0.0).groups == 1


def test_a_starved_consumer_delays_nobody() -> None:
    queue = Queue()
    starved = [
        queue.wait(1000),
        queue.wait(1, where=(("reward", ">", 9),)),
        queue.wait(1, task="critic", columns=("logprobs",)),
    ]
    content = queue.wait(1)
    queue.put("a", columns=(TOKENS,))
    assert queue.served() == {content: ["a"]}
    assert queue.core.stats(0.0).waits == {"groups": 2, "columns": 1}
    assert all(queue.core.cancel(waiter) for waiter in starved)
    assert queue.core.stats(0.0).waits == {} and not queue.core.cancel(content)


def test_a_wait_settles_at_once_if_there_is_enough_and_takes_what_it_may() -> None:
    queue = Queue()
    for name in "abc":
        queue.put(name)
    assert queue.served() == {} and queue.wait(2) == 1
    assert queue.served() == {1: ["a", "b"]}
    assert queue.claim(5) is None and names(queue.take(5, at_least=1)) == ["c"]
    with pytest.raises(SchemaError, match="at_least"):
        queue.claim(2, at_least=3)


def test_a_release_wakes_who_waits_for_it() -> None:
    queue = Queue()
    queue.put("a")
    lease = queue.take()
    waiter = queue.wait()
    queue.core.release(lease.id, now=1.0)
    assert queue.served() == {waiter: ["a"]}


def test_a_predicate_picks_by_tags_all_rows_and_leaves_the_others_to_others() -> None:
    queue = Queue()
    queue.put("low", tags={"reward": [0.0, 0.1], "reason": ["stop", "stop"]})
    queue.put("mixed", tags={"reward": [0.0, 1.0], "reason": ["stop", "length"]})
    queue.put("high", tags={"reward": [0.9, 1.0], "reason": ["stop", "length"]})
    queue.put("untagged")
    assert names(queue.take(where=[["reward", ">", 0.5]])) == ["high"]
    assert queue.claim(where=[["reward", ">", "text"]]) is None, "no order, no match"
    assert names(queue.take(where=[["reason", "in", ["stop"]]])) == ["low"]
    assert names(queue.take(2)) == ["mixed", "untagged"]
    for bad in ([["reward", "~", 1]], [["reward", "==", [1]]], [["reward", ">"]], ["reward"]):
        with pytest.raises(SchemaError, match="column 'where'"):
            queue.claim(where=bad)


def test_a_waiter_with_a_predicate_is_served_when_enough_match_whatever_others_take() -> None:
    queue = Queue()
    waiter = queue.wait(2, where=(("reward", ">=", 1),))
    queue.put("a", tags={"reward": [1, 1]})
    queue.put("b", tags={"reward": [0, 1]})
    assert queue.core.stats(0.0).waits == {"where": 1}
    assert names(queue.take()) == ["a"], "it is not kept for who waits for more"
    queue.put("c", tags={"reward": [2, 1]})
    assert queue.served() == {}
    queue.put("d", tags={"reward": [1, 3]})
    assert queue.served() == {waiter: ["c", "d"]}


def test_what_a_dead_client_had_goes_to_the_living() -> None:
    queue = Queue()
    queue.put("a")
    queue.take(client="dead")
    queue.wait(1, client="dead")
    alive = queue.wait(1, client="alive")
    queue.core.drop_client("dead", now=0.0)
    assert queue.served() == {alive: ["a"]}


def test_a_lease_that_settled_for_a_dead_client_is_not_handed_out() -> None:
    queue = Queue()
    queue.wait(1, client="dead")
    queue.put("a", columns=(TOKENS, LOGPROBS))
    queue.core.drop_client("dead", now=0.0)
    assert queue.core.settled() == [] and names(queue.take()) == ["a"]

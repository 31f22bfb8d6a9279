"""State of one fetch: which rank is asked for which bucket, and which again."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.plugins.reshard.fetch import BucketFetch
from offbeat.weight_sync.buckets import BucketRoute

ROUTES = [
    BucketRoute((0, 1), ((0, 0),)),
    BucketRoute((0,), ((0, 0),)),
    BucketRoute((1, 2), ((0, 1),)),
    BucketRoute((1, 2), ((0, 2),)),
]


def test_a_bucket_that_was_not_asked_for_or_came_already_is_dropped_and_counted() -> None:
    fetch = BucketFetch(ROUTES, [1] * 4)
    sender, buckets = fetch.next() or (-1, ())
    assert (sender, buckets) == (0, (0, 1))
    assert [fetch.took(0, 0), fetch.took(0, 0), fetch.took(1, 1), fetch.took(0, 3)] == [
        True,
        False,
        False,
        False,
    ]
    assert fetch.dropped == 3


def test_what_a_failed_rank_alone_holds_is_lost_and_the_rest_goes_to_the_least_loaded() -> None:
    fetch = BucketFetch(ROUTES, [1, 1, 10, 1])
    fetch.fail(1, "gone")
    assert fetch.next() == (0, (0, 1))
    assert fetch.next() == (2, (3, 2))
    fetch.fail(0, "hangs")
    assert set(fetch.lost) == {0, 1}
    assert fetch.is_over


def test_a_release_is_gone_when_all_holders_of_a_bucket_have_ended_or_have_another_one() -> None:
    routes = [BucketRoute((0, 1), ((0, 0),)), BucketRoute((2,), ((0, 2),))]
    silent, gone = BucketFetch(routes, [1, 1]), BucketFetch(routes, [1, 1])
    for fetch, last in ((silent, False), (gone, True)):
        fetch.fail(0, "has ended", gone=True)
        assert not fetch.is_release_gone, "rank 1 holds a copy"
        fetch.fail(1, "hangs, or has ended", gone=last)
        assert fetch.lost.keys() == {0}
    assert gone.is_release_gone
    assert not silent.is_release_gone, "a rank that hangs may still have it"


@given(st.data())
def test_whatever_fails_every_bucket_arrives_once_or_is_lost_with_all_its_holders(
    data: st.DataObject,
) -> None:
    ranks = data.draw(st.integers(1, 5))
    routes = list[BucketRoute]()
    for _ in range(data.draw(st.integers(0, 8))):
        holders = sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
        routes.append(BucketRoute(tuple(holders), ((0, data.draw(st.sampled_from(holders))),)))
    fetch = BucketFetch(routes, [1] * len(routes), first=data.draw(st.integers(0, 9)))
    while (task := fetch.next()) is not None:
        sender, buckets = task
        assert sender not in fetch.failed
        ends_at = data.draw(st.integers(0, len(buckets)))
        for bucket in buckets[:ends_at]:
            assert fetch.took(sender, bucket)
        if ends_at < len(buckets):
            fetch.fail(sender, "fails")
        else:
            fetch.ended(sender)
    assert fetch.is_over
    assert (fetch.arrived == set(range(len(routes)))) == (not fetch.lost)
    for bucket in fetch.lost:
        assert set(routes[bucket].holders) <= set(fetch.failed)
        assert bucket not in fetch.arrived


def test_buckets_that_the_plan_has_for_no_such_receiver_come_from_the_least_loaded_holder() -> None:
    routes = [BucketRoute((0, 1), ((0, 0),)), BucketRoute((0, 1), ((0, 0),))]
    fetch = BucketFetch(routes, [10, 10], 7, needed=(0, 1))
    assert fetch.next() == (0, (0,))
    assert fetch.next() == (1, (1,))
    assert fetch.next() is None
    planned = BucketFetch(routes, [10, 10], 0, needed=(1,))
    assert planned.next() == (0, (1,))
    assert planned.next() is None

from offbeat.queue_service.server.wake_latency import LatencyHistogram


def test_nobody_waited_is_zero() -> None:
    assert LatencyHistogram().p99_s == 0.0


def test_the_bound_is_at_least_the_time_and_at_most_a_quarter_above_it() -> None:
    for time_s in (0.0, 1e-6, 3e-6, 7.5e-6, 8e-6, 0.0005, 0.004, 0.00488, 2.5):
        wakes = LatencyHistogram()
        wakes.add(time_s)
        assert time_s <= wakes.p99_s <= 1.25 * time_s + 1.1e-6


def test_one_in_a_hundred_may_be_slower() -> None:
    wakes = LatencyHistogram()
    for _ in range(99):
        wakes.add(10e-6)
    wakes.add(1.0)
    assert wakes.count == 100
    assert wakes.p99_s < 20e-6
    wakes.add(1.0)
    assert wakes.p99_s >= 1.0


def test_a_time_beyond_all_buckets_is_counted_in_the_last() -> None:
    wakes = LatencyHistogram()
    wakes.add(1e9)
    assert wakes.count == 1
    assert wakes.p99_s == 2**41 * 1e-6, "the end of the last bucket, 25 days"

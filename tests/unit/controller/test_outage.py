"""The circuit breaker for failures of the environment."""

import pytest

from offbeat.config.sections.rollout import RolloutConfig
from offbeat.controller.outage import OutageBreaker, backoff_s


def test_waits_double_up_to_their_bound_however_long_an_outage_lasts() -> None:
    limits = RolloutConfig(backoff_s=0.5, backoff_max_s=10.0)
    waits = [backoff_s(limits, failures) for failures in (1, 2, 3, 6, 5000)]
    assert waits == [0.5, 1.0, 2.0, 10.0, 10.0]


def test_an_outage_of_thousands_of_trials_ends_with_the_first_answer() -> None:
    limits = RolloutConfig()
    breaker, now = OutageBreaker(limits), 0.0
    for number in range(5000):
        breaker.dispatched()
        breaker.failed(now, f"sample 0 failed\nat {number}")
        assert breaker.remaining_s(now) <= limits.backoff_max_s
        now += breaker.remaining_s(now)
        assert breaker.may_dispatch(now)
    assert breaker.trials == pytest.approx(5000, abs=limits.outage_failures)
    assert breaker.describe().endswith("The last failure: sample 0 failed at 4999")
    breaker.answered()
    assert not breaker.is_open

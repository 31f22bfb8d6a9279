import asyncio
from collections.abc import Awaitable, Callable

import pytest

from offbeat.environments.async_calls import AsyncCalls, CallLimits
from offbeat.environments.protocol import EnvironmentUnavailable
from offbeat.environments.reward_value import BadReward, RewardFault, unavailable
from tests.support.virtual_time import run

Reward = Callable[[dict[str, object], str], Awaitable[object]]


class Judge:
    """Answers each call with the next outcome of a script, then with 1.0, each after a while."""

    def __init__(self, *script: object, takes_s: float = 0.0) -> None:
        self._script, self._takes_s = list(script), takes_s
        self.started_at = list[float]()
        self.open = self.most_open = 0

    async def reward(self, row: dict[str, object], response: str) -> object:
        self.started_at.append(asyncio.get_running_loop().time())
        outcome = self._script.pop(0) if self._script else 1.0
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self._takes_s)
        finally:
            self.open -= 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def limits(
    *,
    deadline_s: float = 100.0,
    concurrency: int = 8,
    calls_per_s: float | None = None,
    retries: int = 0,
    retry_on: tuple[str, ...] = (),
) -> CallLimits:
    return CallLimits(deadline_s, concurrency, calls_per_s, retries, retry_on)


def outcomes(judge: Judge, bounds: CallLimits, calls: int = 1) -> list[object]:
    async def story() -> list[object]:
        at_once = AsyncCalls(judge.reward, bounds)
        called = (at_once.call({}, str(number)) for number in range(calls))
        return await asyncio.gather(*called)

    return run(story())


def test_no_more_calls_are_open_at_once_than_allowed() -> None:
    judge = Judge(takes_s=1.0)
    assert outcomes(judge, limits(concurrency=3), calls=10) == [1.0] * 10
    assert judge.most_open == 3
    assert judge.started_at == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_every_try_is_announced_before_it_is_made() -> None:
    async def story() -> tuple[list[float], list[float]]:
        judge = Judge(EnvironmentUnavailable("503"), EnvironmentUnavailable("503"))
        announced = list[float]()
        clock = asyncio.get_running_loop().time
        at_once = AsyncCalls(judge.reward, limits(retries=2), lambda: announced.append(clock()))
        await at_once.call({}, "a")
        return announced, judge.started_at

    announced, started_at = run(story())
    assert announced == started_at == [0.0, 0.25, 0.75]


def test_calls_start_at_the_rate_allowed_their_retries_included() -> None:
    judge = Judge(EnvironmentUnavailable("503"))
    assert outcomes(judge, limits(calls_per_s=2.0, retries=1), calls=3) == [1.0] * 3
    assert judge.started_at == [0.0, 0.5, 1.0, 1.5]


def test_a_call_is_tried_again_after_growing_waits_or_when_the_service_asked_for_it() -> None:
    asked = EnvironmentUnavailable("429", retry_after_s=7.0)
    judge = Judge(EnvironmentUnavailable("503"), EnvironmentUnavailable("503"), asked)
    assert outcomes(judge, limits(retries=3)) == [1.0]
    assert judge.started_at == [0.0, 0.25, 0.75, 7.75]


def test_a_service_that_stays_unavailable_is_no_reward_and_no_fault_of_the_sample() -> None:
    judge = Judge(*[EnvironmentUnavailable("the judge answers 503")] * 9)
    (bad,) = outcomes(judge, limits(retries=2))
    assert isinstance(bad, BadReward)
    assert bad.fault is RewardFault.SERVICE
    assert bad.detail.endswith("in reward: EnvironmentUnavailable: the judge answers 503")
    assert len(judge.started_at) == 3


def test_a_service_that_is_too_slow_is_unavailable_and_its_call_is_cancelled() -> None:
    judge = Judge(takes_s=60.0)
    (bad,) = outcomes(judge, limits(deadline_s=9.0))
    assert bad == unavailable("no reward within 9 s: its service is slow or down")
    assert judge.open == 0


class Refused(ConnectionError):
    """As a client library raises it."""


@pytest.mark.parametrize("named", ["Refused", "ConnectionError"])
def test_an_error_that_the_recipe_names_by_its_class_or_a_base_is_tried_again(named: str) -> None:
    assert outcomes(Judge(Refused()), limits(retries=1, retry_on=(named,))) == [1.0]


@pytest.mark.parametrize(
    ("error", "retries"),
    [(Refused(), 1), (ValueError("no grade"), 5), (TimeoutError("its own"), 5)],
)
def test_any_other_error_is_raised_at_once(error: Exception, retries: int) -> None:
    judge = Judge(error)
    with pytest.raises(type(error)):
        outcomes(judge, limits(retries=retries, retry_on=("OverflowError",)))
    assert len(judge.started_at) == 1

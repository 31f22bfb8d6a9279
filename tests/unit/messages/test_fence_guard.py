import pytest

from offbeat.messages.failures import StaleFence
from offbeat.messages.fences import Fence, FenceGuard


def test_the_first_fence_binds_the_run_and_may_repeat() -> None:
    guard = FenceGuard("trainer rank 0")
    for _ in range(3):
        guard.check(Fence("run-a", 1))


def test_another_run_is_refused_by_name() -> None:
    guard = FenceGuard("trainer rank 0")
    guard.check(Fence("run-a", 1))
    with pytest.raises(StaleFence) as refused:
        guard.check(Fence("run-b", 9))
    assert str(refused.value) == (
        "trainer rank 0 refuses a call with fence (run-b, incarnation 9): the fence in force is "
        "(run-a, incarnation 1)"
    )


def test_an_older_incarnation_is_refused_once_a_newer_one_was_heard() -> None:
    guard = FenceGuard("generator-0")
    guard.check(Fence("run-a", 1))
    guard.check(Fence("run-a", 3))
    with pytest.raises(StaleFence):
        guard.check(Fence("run-a", 2))
    guard.check(Fence("run-a", 3))


def test_a_refused_fence_changes_nothing() -> None:
    guard = FenceGuard("generator-0")
    guard.check(Fence("run-a", 2))
    for stale in (Fence("run-b", 5), Fence("run-a", 1)):
        with pytest.raises(StaleFence):
            guard.check(stale)
    guard.check(Fence("run-a", 2))

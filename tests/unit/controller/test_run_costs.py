"""Costs of a run as the fold of its journal's cost events."""

import msgspec

from offbeat.controller.events import Joined, RewardCallsMade
from offbeat.controller.run_stats import RunStats
from offbeat.messages.failures import Component


def test_reward_calls_of_replaced_workers_stay_counted_and_a_snapshot_does_not_grow_with_them() -> (
    None
):
    stats = RunStats()
    stats.add(Joined(Component.WORKER, "environment-1", "environment-1-a"))
    stats.add(RewardCallsMade("environment-1-a", 7))
    for number in range(2000):
        process = f"environment-0-{number}"
        stats.add(Joined(Component.WORKER, "environment-0", process))
        stats.add(RewardCallsMade(process, 3))
        stats.add(RewardCallsMade(process, 5))
    stats.add(RewardCallsMade("environment-0-1998", 6))  # a late report
    stats.add(RewardCallsMade("environment-1-a", 8))
    assert stats.costs.reward_calls == 2000 * 5 + 1 + 8
    assert len(msgspec.msgpack.encode(stats.costs)) < 5000


def test_a_late_report_of_the_process_that_lived_longest_counts_what_is_new() -> None:
    stats = RunStats()
    stats.add(Joined(Component.WORKER, "environment-1", "environment-1-a"))
    stats.add(RewardCallsMade("environment-1-a", 7))
    restarts = [f"environment-0-{number}" for number in range(1000)]
    for process in restarts:
        stats.add(Joined(Component.WORKER, "environment-0", process))
        stats.add(RewardCallsMade(process, 3))
    stats.add(RewardCallsMade("environment-1-a", 1_000_000))
    stats.add(Joined(Component.WORKER, "environment-1", "environment-1-b"))
    stats.add(Joined(Component.WORKER, "environment-0", "environment-0-last"))
    stats.add(RewardCallsMade("environment-0-last", 3))
    stats.add(RewardCallsMade("environment-1-a", 1_000_001))
    assert stats.costs.reward_calls == 1001 * 3 + 1_000_001

"""Costs of a run as the fold of its journal's cost events."""

import msgspec

from offbeat.controller.events import Joined, RewardCallsMade
from offbeat.controller.run_costs import RunCosts
from offbeat.messages.failures import Component


def test_reward_calls_of_replaced_workers_stay_counted_and_a_snapshot_does_not_grow_with_them() -> (
    None
):
    costs = RunCosts()
    costs.take(Joined(Component.WORKER, "environment-1", "environment-1-a"))
    costs.take(RewardCallsMade("environment-1-a", 7))
    for number in range(2000):
        process = f"environment-0-{number}"
        costs.take(Joined(Component.WORKER, "environment-0", process))
        costs.take(RewardCallsMade(process, 3))
        costs.take(RewardCallsMade(process, 5))
    costs.take(RewardCallsMade("environment-0-1998", 6))  # a late report
    costs.take(RewardCallsMade("environment-1-a", 8))
    assert costs.reward_calls == 2000 * 5 + 1 + 8
    assert len(msgspec.msgpack.encode(costs)) < 5000


def test_a_late_report_of_the_process_that_lived_longest_counts_what_is_new() -> None:
    costs = RunCosts()
    costs.take(Joined(Component.WORKER, "environment-1", "environment-1-a"))
    costs.take(RewardCallsMade("environment-1-a", 7))
    restarts = [f"environment-0-{number}" for number in range(1000)]
    for process in restarts:
        costs.take(Joined(Component.WORKER, "environment-0", process))
        costs.take(RewardCallsMade(process, 3))
    costs.take(RewardCallsMade("environment-1-a", 1_000_000))
    costs.take(Joined(Component.WORKER, "environment-1", "environment-1-b"))
    costs.take(Joined(Component.WORKER, "environment-0", "environment-0-last"))
    costs.take(RewardCallsMade("environment-0-last", 3))
    costs.take(RewardCallsMade("environment-1-a", 1_000_001))
    assert costs.reward_calls == 1001 * 3 + 1_000_001

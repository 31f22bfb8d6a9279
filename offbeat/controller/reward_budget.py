"""Bound on the calls of reward functions over the whole run, resumes included."""

import structlog

from offbeat.config.reward_calls import max_reward_calls
from offbeat.controller.errors import RewardCallBudgetSpent
from offbeat.controller.state import RunState

log = structlog.stdlib.get_logger()


class RewardBudget:
    """Says whether one more group may be dispatched: each in flight may make all of its calls."""

    def __init__(self, state: RunState) -> None:
        self._state, self._limit = state, state.config.rollout.reward_call_budget
        self._per_group = max_reward_calls(state.config)

    @property
    def covers_next_group(self) -> bool:
        """Return whether the calls that are left cover the groups in flight and one more."""
        if self._limit is None:
            return True
        state = self._state
        reserved = (state.ledger.in_flight + 1) * self._per_group
        return state.tally.reward_calls + reserved <= self._limit

    @property
    def is_settled(self) -> bool:
        """Return whether the answer can no longer change: no group in flight may leave calls over."""
        return self.covers_next_group or not self._state.ledger.in_flight

    def end_run(self) -> None:
        """End the run as the recipe says, because nothing covers one more group.

        Raises:
            RewardCallBudgetSpent: With ``rollout.on_reward_budget_spent: fail``.
        """
        state, limit = self._state, self._limit or 0
        spent = RewardCallBudgetSpent(
            f"the up to {self._per_group} calls of one more group",
            limit,
            "rollout.reward_call_budget",
            f"the run has made {state.tally.reward_calls} calls of reward functions",
        )
        if state.config.rollout.on_reward_budget_spent == "fail":
            raise spent
        log.warning("rewards.budget_spent", calls=state.tally.reward_calls, error=str(spent))
        state.operator.stop()

"""Limits the calls of reward functions over the whole run, evaluations and resumes included."""

import structlog

from offbeat.config.limits import max_evaluation_calls, max_reward_calls
from offbeat.controller.errors import RewardCallBudgetSpent
from offbeat.controller.state import RunState

log = structlog.stdlib.get_logger()


class RewardBudget:
    """Checks whether the budget covers one more group or evaluation.

    Open work counts with all calls that it may still make. The calls of the next due evaluation are
    reserved, so training ends while that evaluation can still be scored. An evaluation uses no
    calls that open groups may need.
    """

    def __init__(self, state: RunState) -> None:
        self._state, self._limit = state, state.config.rollout.reward_call_budget
        self._per_group = max_reward_calls(state.config)
        self._per_evaluation = max_evaluation_calls(state.config)

    def metrics(self) -> dict[str, float]:
        """Return the calls so far, if they are counted, and the calls left, if they are limited."""
        if not self._per_group:
            return {}
        calls = self._state.costs.reward_calls
        left = {} if self._limit is None else {"rollout/reward_calls_left": self._limit - calls}
        return {"rollout/reward_calls": calls, **left}

    @property
    def covers_next_group(self) -> bool:
        """Return whether the calls left cover groups in flight, evaluations, and one more group."""
        if self._limit is None:
            return True
        evaluations = self._open_evaluations + self._is_one_ahead
        return self._covers(self._state.ledger.in_flight + 1, evaluations)

    @property
    def covers_evaluation(self) -> bool:
        """Return whether the calls left cover groups in flight and the evaluation in progress."""
        return self._covers(self._state.ledger.in_flight, 1)

    @property
    def is_settled(self) -> bool:
        """Return whether the answer is final: no open work could still leave calls unused."""
        return self.covers_next_group or not (
            self._state.ledger.in_flight or self._open_evaluations
        )

    def end_run(self) -> None:
        """End the run as the recipe says, because nothing covers one more group.

        Raises:
            RewardCallBudgetSpent: With ``rollout.on_reward_budget_spent: fail``.
        """
        state, limit = self._state, self._limit or 0
        beside = f" and {self._per_evaluation} of an evaluation" * self._is_one_ahead
        spent = RewardCallBudgetSpent(
            f"the up to {self._per_group} calls of one more group{beside}",
            limit,
            "rollout.reward_call_budget",
            f"the run has made {state.costs.reward_calls} calls of reward functions",
        )
        if state.config.rollout.on_reward_budget_spent == "fail":
            raise spent
        log.warning("rewards.budget_spent", calls=state.costs.reward_calls, error=str(spent))
        state.operator.stop(f"rollout.reward_call_budget={limit}")

    @property
    def _open_evaluations(self) -> int:
        """Return the number of running, requested or imminent evaluations of a trained version."""
        evaluation, version = self._state.evaluation, self._state.ledger.trainer_version
        interval = self._state.config.eval.interval
        if not self._per_evaluation:
            return 0
        is_due = bool(interval) and version % interval == 0 and evaluation.newest_due < version
        return evaluation.is_busy + (evaluation.requested_version is not None) + is_due

    @property
    def _is_one_ahead(self) -> bool:
        """Return whether an evaluation is due at a later step of the run."""
        config, version = self._state.config, self._state.ledger.trainer_version
        interval = config.eval.interval
        return bool(self._per_evaluation and interval) and (
            version - version % interval + interval <= config.steps
        )

    def _covers(self, groups: int, evaluations: int) -> bool:
        if self._limit is None:
            return True
        reserved = groups * self._per_group + evaluations * self._per_evaluation
        return self._state.costs.reward_calls + reserved <= self._limit

"""Bound on the calls of reward functions over the whole run, evaluations and resumes included."""

import structlog

from offbeat.config.limits import max_evaluation_calls, max_reward_calls
from offbeat.controller.errors import RewardCallBudgetSpent
from offbeat.controller.state import RunState

log = structlog.stdlib.get_logger()


class RewardBudget:
    """Says whether one more group, or an evaluation, is covered: what is open may make all its calls.

    The evaluation that is due next has its calls reserved: training ends while it can still be
    scored, and what training has been given is not taken by an evaluation.
    """

    def __init__(self, state: RunState) -> None:
        self._state, self._limit = state, state.config.rollout.reward_call_budget
        self._per_group = max_reward_calls(state.config)
        self._per_evaluation = max_evaluation_calls(state.config)

    def metrics(self) -> dict[str, float]:
        """Return the calls so far, where functions are counted, and those left, where it is bounded."""
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
        """Return whether the answer can no longer change: nothing is open that may leave calls over."""
        return self.covers_next_group or not (
            self._state.ledger.in_flight or self._open_evaluations
        )

    def end_run(self) -> None:
        """End the run as the recipe says, because nothing covers one more group.

        Raises:
            RewardCallBudgetSpent: With ``rollout.on_reward_budget_spent: fail``.
        """
        state, limit = self._state, self._limit or 0
        beside = f" beside the {self._per_evaluation} of an evaluation" * self._is_one_ahead
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
        """Evaluations that run, are requested, or are about to be: their version is trained."""
        evaluation, version = self._state.evaluation, self._state.ledger.trainer_version
        interval = self._state.config.eval.interval
        if not self._per_evaluation:
            return 0
        is_due = bool(interval) and version % interval == 0 and evaluation.newest_due < version
        return evaluation.is_busy + (evaluation.requested_version is not None) + is_due

    @property
    def _is_one_ahead(self) -> bool:
        """Return whether a later step of the run is scored."""
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

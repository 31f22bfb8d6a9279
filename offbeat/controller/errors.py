"""Errors that end a run. All survive pickling across an actor boundary."""

from collections.abc import Iterator
from typing import cast

from offbeat.messages.failures import DeadlineExceeded, OffbeatError, RolloutFailed, UserCodeRefused


class RunAborted(OffbeatError):
    """An operator or a signal requested an immediate end.

    Fix: resume the run to continue.
    """

    reason: str

    def __str__(self) -> str:
        return self.reason


class RunStalled(OffbeatError):
    """Nothing changed for ``stall_timeout_s``, and no open call is within its deadline.

    Fix: correct a custom sampler; else report it.
    """

    quiet_s: float
    where: str
    waits: str

    def __str__(self) -> str:
        return f"nothing moved for {self.quiet_s:g} s; {self.where}; {self.waits}"


class BudgetSpent(OffbeatError):
    """A tolerated kind of failure happened more often than its budget allows.

    Fix: correct the failure in ``failures.jsonl``, or raise the named budget.
    """

    what: str
    budget: int
    key: str
    last: str
    fix: str = "Fix that"

    def __str__(self) -> str:
        return (
            f"{self.last.rstrip('.')}. {self.fix}, or raise {self.key}: the limit is "
            f"{self.budget} {self.what}"
        )


class EveryRolloutFailed(BudgetSpent):
    """No rollout was answered, and the failures would spend a budget of dropped groups.

    Fix: correct reward, agent or environment at the named line.
    """

    def __str__(self) -> str:
        return (
            f"{self.last.rstrip('.')}. {self.fix}: no rollout has succeeded, and this failure "
            f"would spend all {self.what} with {self.key}={self.budget}"
        )


class RewardCallBudgetSpent(BudgetSpent):
    """The remaining calls of reward functions do not cover one more group.

    Fix: raise ``rollout.reward_call_budget``, or set ``rollout.on_reward_budget_spent=stop``.
    """

    def __str__(self) -> str:
        return (
            f"{self.last}, and {self.key}={self.budget}: the rest does not cover {self.what}. "
            f"Raise {self.key} and resume, or set rollout.on_reward_budget_spent=stop"
        )


class EveryCanaryFailed(OffbeatError):
    """No engine reproduces the trainer's log-probabilities from the released weights.

    Fix: compare dtype and attention of trainer and engine (docs/weight-sync.md).
    """

    engines: int
    last: str

    def __str__(self) -> str:
        return (
            f"all {self.engines} engines failed the canary of the weights, also after a new "
            f"sync and a replacement. The last one: {self.last}. Compare dtype, attention and "
            "model of trainer and engines. If they are the same, raise sync.canary_tolerance. "
            "sync.canary_interval=0 turns the check off"
        )


class LogprobGapTooLarge(OffbeatError):
    """Engine and trainer disagree on samples drawn with the weights being trained.

    Fix: compare dtype and sampling of trainer and engine (docs/weight-sync.md).
    """

    step: int
    gap: float
    bound: float

    def __str__(self) -> str:
        return (
            f"step {self.step}: logprobs of engine and trainer differ by {self.gap:.3g} nats per "
            f"token under the same weight version, more than sync.max_logprob_gap={self.bound:g}: "
            "the engine computes a different policy from the one being trained. Compare dtype, "
            "attention and sampling settings of both, or raise sync.max_logprob_gap"
        )


class EngineBudgetSpent(BudgetSpent):
    """Engines were lost more often than their budget allows, and too few engines remain.

    Fix: correct the failure in the engine's log, or raise the named budget.
    """


class TrainerBudgetSpent(BudgetSpent):
    """The trainer failed more often than its budget allows. Its state is not saved.

    Fix: correct the named failure, or raise the named budget.
    """


class EngineNotStarted(DeadlineExceeded):
    """An engine did not start in time, and no other one is alive.

    Fix: free GPUs or memory, or raise ``generator.start_deadline_s``.
    """


class TrainerLost(OffbeatError):
    """A trainer rank is gone, late, or disagrees with the ledger. All ranks are replaced.

    Fix: lower ``trainer.max_tokens_per_microbatch``; if steps are slow, raise
    ``trainer.step_deadline_s``.
    """

    during: str
    detail: str

    def __str__(self) -> str:
        return f"the trainer was lost in {self.during}: {self.detail}"


class OtherWeights(OffbeatError):
    """The checkpoint that the trainer restored was not written by this run.

    Fix: put the run's own checkpoints back.
    """

    version: int
    restored: str
    written: str

    def __str__(self) -> str:
        return (
            f"the checkpoint of version {self.version} has weights {self.restored}, but this "
            f"run wrote {self.written}: it belongs to another run. Restore this run's "
            "checkpoint, or start a new run from the other run's model"
        )


class TrainerAhead(OffbeatError):
    """The trainer has applied a step that the journal does not contain.

    Fix: resume the run, which starts new actors.
    """

    trainer: str
    journal: str

    def __str__(self) -> str:
        return (
            f"the trainer is at {self.trainer}, the journal at {self.journal}: they are not of one "
            "run, or the journal was cut by more than a crash does. Resume on new actors, from a "
            "checkpoint"
        )


class EmptyBatch(OffbeatError):
    """Every prompt of a step was dropped, so there is nothing to train.

    Fix: correct the failures in ``logs/controller.log``.
    """

    step: int

    def __str__(self) -> str:
        return (
            f"step {self.step} has no prompt group left: all were dropped. "
            "Repair the prompts named above, set rollout.on_dropped_prompt=replace, or, where the "
            "prompts have come to their end, give the run more (data.path, data.epochs)"
        )


class RunFailed(OffbeatError):
    """The run ended with an error. ``causes`` has the original exceptions in order.

    Fix: fix the first cause, then resume the run.
    """

    phase: str
    step: int
    version: int
    causes: list[BaseException]

    @property
    def is_of_user_code(self) -> bool:
        """Return whether user code failed first, or spent a budget by failing."""
        first = self.causes[0]
        if any(isinstance(each, UserCodeRefused) for each in (first, first.__cause__)):
            return True
        failure = first.__cause__ if isinstance(first, BudgetSpent) else first
        return isinstance(failure, RolloutFailed) and failure.is_of_user_code

    def __str__(self) -> str:
        first = self.causes[0]
        more = f" (and {len(self.causes) - 1} more)" if len(self.causes) > 1 else ""
        return (
            f"run {self.phase} at step {self.step}, trainer version {self.version}: "
            f"{type(first).__name__}: {first}{more}"
        )


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions in ``error``, without the groups around them."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(inner)
    else:
        yield error

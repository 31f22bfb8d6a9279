"""Typed failures of a run, classified where they happen."""

import enum
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, dataclass_transform


class FailureKind(enum.StrEnum):
    """Classification of a failure by whether a retry can help."""

    INFRASTRUCTURE = "infrastructure"  # a retry on another engine, or later, may succeed
    DATA = "data"  # this prompt cannot be rolled out
    BUG = "bug"  # unexpected: the run ends


class Component(enum.StrEnum):
    """Part of a run that fails, is waited for, or is restarted."""

    ENGINE = "engine"
    WORKER = "worker"  # environment worker: its supervisor replaces it
    ENVIRONMENT = "environment"  # user code, or a service that it calls
    TRAINER = "trainer"  # all ranks together
    CONTROLLER = "controller"
    JOURNAL = "journal"  # the disk with the journal
    OBJECT_STORE = "object store"


ENVIRONMENT_UNAVAILABLE: Final = "environment_unavailable"
"""``RolloutFailed.reason`` of an environment that reports that it is out of service."""
WORKER_LOST: Final = "actor_lost"
"""Reason for returning a group whose environment worker was lost."""


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class OffbeatError(Exception):
    """Base of every error that this package raises on purpose.

    A subclass declares its *fields* as a dataclass does, and formats them in ``__str__``. The
    fields become its ``args``, because pickle rebuilds an exception by calling its class with
    ``args``. If ``args`` were only a sentence, the error would lose its class at the first actor
    boundary.
    """

    __match_args__: ClassVar[tuple[str, ...]] = ()  # fields that the constructor accepts

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401 - those of other bases
        super().__init_subclass__(**kwargs)
        if inspect.get_annotations(cls):
            dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, name) for name in self.__match_args__)


class ShortInNotebooks:
    """Mixin for errors whose text explains itself. A notebook shows them without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class FixableError(OffbeatError):
    """Error that the user can fix: its subject, the problem, and the fix."""

    form: ClassVar[str] = "{}: {}. {}"  # formats the three fields

    subject: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return self.form.format(self.subject, self.problem, self.fix)


class UserCodeRefused(FixableError):
    """Code of the user cannot be used, or returned an unusable value.

    Fix: correct that function, then resume the run.
    """


_USER_PARTS: Final = frozenset({"reward", "answer", "agent", "environment"})
"""First words of the reasons for failures in user code."""


class RolloutFailed(OffbeatError):
    """One prompt group could not be rolled out. The run continues, unless the cause is a bug.

    Fix: see the table of reasons.
    """

    def __init__(
        self,
        kind: FailureKind,
        prompt_index: int,
        attempt: int,
        reason: str,
        detail: str,
        source: Component | None = None,
        sample: int | None = None,
    ) -> None:
        """``source`` defaults to the engine for infrastructure failures, else the environment.

        ``sample`` is the failed sample, or None if it is unknown or the whole group failed.
        """
        super().__init__(kind, prompt_index, attempt, reason, detail, source, sample)
        self.kind, self.prompt_index, self.attempt = kind, prompt_index, attempt
        self.reason = reason  # name of a counter: reward_raised, reward_nan, engine_lost, ...
        self.detail = detail  # one line for the user
        by_engine = kind is FailureKind.INFRASTRUCTURE
        usual = Component.ENGINE if by_engine else Component.ENVIRONMENT
        self.source = source or usual
        self.sample = sample
        self.prompt = ""  # the beginning of its text, once known
        self.response_ids: Sequence[int] = ()  # of the failed sample, until they are in a file

    @property
    def is_of_user_code(self) -> bool:
        """Return whether the fix is in user code: in a reward, answer, agent or environment."""
        part, _, _ = self.reason.partition("_")
        return self.kind is not FailureKind.INFRASTRUCTURE and part in _USER_PARTS

    def __str__(self) -> str:
        sample = "" if self.sample is None else f"sample {self.sample} of "
        prompt = f"{self.prompt!r}, " if self.prompt else ""
        return (
            f"{self.detail.rstrip('.')} ({sample}{prompt}group {self.prompt_index}, attempt "
            f"{self.attempt}: {self.kind}, {self.reason})"
        )


class StrayMediaToken(RolloutFailed):
    """A text of the group has a token that represents media.

    Fix: remove the token from the text.
    """

    __init__ = RolloutFailed.__init__  # for type checkers, which expect a dataclass constructor


class ActorLost(OffbeatError):
    """A remote process has died or can no longer be reached.

    Fix: none while budgets last. If it recurs, raise memory; if the controller was lost, resume.
    """

    actor: str
    during: str
    detail: str

    def __str__(self) -> str:
        return f"{self.actor} was lost during {self.during}: {self.detail}"


class RemoteBug(OffbeatError):
    """An actor raised an unexpected error: a bug, so the run ends with its location.

    Fix: report it.
    """

    actor: str
    during: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.actor} raised {self.kind} in {self.during}: {self.detail}"


class ArgumentLost(ActorLost):
    """An argument was lost with the machine that stored it, so the call was not executed.

    The actor itself is alive. Callers that pass references handle this error separately. For all
    other callers, the call did not reach the actor.

    Fix: none: the call is repeated with new data.
    """

    object_id: str  # as in ``ObjectRef.hex()``

    def __str__(self) -> str:
        return f"{self.actor} is alive, but an argument of {self.during} is lost: {self.detail}"


class StartFailed(OffbeatError):
    """A process could not be set up. Another start would fail the same way.

    Fix: correct the cause that the message names.
    """

    actor: str
    detail: str

    def __str__(self) -> str:
        return f"{self.actor} cannot start: {self.detail}"


class EngineUnavailable(OffbeatError):
    """The engine of this process is broken, closed or paused. The request had no effect.

    Fix: none: the group goes elsewhere and the engine restarts.
    """

    engine: str
    during: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"engine {self.engine} cannot {self.during}: {self.problem}. {self.fix}"


class InvalidRequest(OffbeatError):
    """A generate request that this engine can never serve. No part of it was accepted.

    Fix: shorten the prompt, or raise ``generator.max_model_len``.
    """

    request_id: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"request {self.request_id!r} refused: {self.problem}. {self.fix}"


class DeadlineExceeded(OffbeatError):
    """A named remote call exceeded its deadline.

    Fix: free resources or check the disk, or raise the named deadline.
    """

    waiter: str
    target: str
    deadline_s: float
    component: Component | None = None  # late part of the run, if it is a component

    def __str__(self) -> str:
        return (
            f"{self.waiter} waited for {self.target} longer than its deadline of "
            f"{self.deadline_s:g} s"
        )


class StaleFence(OffbeatError):
    """A call of an older controller incarnation, or of another run, was refused.

    Fix: end the second controller; if there is none, report it.
    """

    actor: str
    got: str
    in_force: str

    def __str__(self) -> str:
        return (
            f"{self.actor} refuses a call with fence {self.got}: the fence in force is "
            f"{self.in_force}"
        )


class StepAlreadyOpen(OffbeatError):
    """``begin_train_step`` was called while another step is open.

    Fix: report it.
    """

    open_step: int
    open_attempt: int
    asked_step: int

    def __str__(self) -> str:
        return (
            f"cannot begin step {self.asked_step}: step {self.open_step} (attempt "
            f"{self.open_attempt}) is open. Finish or abort it first"
        )


class StepOutOfOrder(OffbeatError):
    """A call of a train step has a key other than the expected one.

    Fix: report it.
    """

    got: str
    expected: str

    def __str__(self) -> str:
        return f"train step call {self.got} is out of order: expected {self.expected}"


class StepBroken(StepOutOfOrder):
    """A call was refused because an earlier call of its step failed. Only an abort is accepted.

    This error may arrive before the reply to the failed call.

    Fix: none: the step is aborted and repeated.
    """


class TrainerCall(enum.StrEnum):
    """Trainer calls that can fail on a rank that is still alive."""

    BEGIN = "begin"
    PREPARE_LOGPROBS = "prepare_logprobs"
    MICROBATCH = "microbatch"
    FINISH = "finish"
    ABORT = "abort"
    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"
    SAVE = "save"
    EARLIER = "an earlier call"  # replies to later calls arrived before its reply


class TrainStepFailed(OffbeatError):
    """A call of a train step raised on a rank that is still alive. Aborting and retrying may help.

    Fix: lower ``trainer.max_tokens_per_microbatch`` if memory is short; else see the named line.
    """

    rank: int
    step: int
    during: TrainerCall
    detail: str

    def __str__(self) -> str:
        return (
            f"trainer rank {self.rank} failed in {self.during} of step {self.step}: {self.detail}"
        )


class WeightsUnmoved(OffbeatError):
    """An optimizer step with a learning rate and a gradient changed none of the sampled weights.

    Fix: raise ``trainer.optimizer.learning_rate``; if the rate is not tiny, report the error.
    """

    rank: int
    step: int
    learning_rate: float
    grad_norm: float
    sampled: int

    def __str__(self) -> str:
        return (
            f"step {self.step} had learning rate {self.learning_rate:g} and gradient norm "
            f"{self.grad_norm:g}, but none of {self.sampled:,} sampled weights with a gradient "
            f"changed (trainer rank {self.rank}): the update is below the precision of their "
            "type, or the optimizer updates tensors that are not the model's. Raise "
            "trainer.optimizer.learning_rate; if the rate is not tiny, report this as a bug"
        )


class UnfitGroup(OffbeatError):
    """No trainer can read the columns of one group. The step is aborted and repeated without it.

    Fix: none: the group is rolled out again within ``rollout.data_retries``.
    """

    rank: int
    prompt_index: int
    problem: str

    def __str__(self) -> str:
        return f"trainer rank {self.rank} cannot train group {self.prompt_index}: {self.problem}"


class PayloadLost(OffbeatError):
    """The columns of some groups were lost with the machine that held them. The trainer is healthy.

    The columns are read again from the spool, or the groups are rolled out again. The step is
    aborted and retried.

    Fix: none: the groups are read from the spool or rolled out again.
    """

    prompt_indices: tuple[int, ...]
    during: str
    detail: str

    def __str__(self) -> str:
        groups = ", ".join(map(str, self.prompt_indices))
        return f"the payloads of groups {groups} were lost before {self.during}: {self.detail}"


class CheckpointFailed(OffbeatError):
    """A checkpoint could not be written or loaded. Complete checkpoints are not affected.

    Fix: check the disk's free space and permissions; older checkpoints stay.
    """

    rank: int
    version: int
    detail: str

    def __str__(self) -> str:
        return (
            f"trainer rank {self.rank} failed at its checkpoint of version {self.version}: "
            f"{self.detail}"
        )


class WeightSyncFailed(OffbeatError):
    """A generator did not load the weights. It must not serve until a full sync succeeds.

    Fix: none if it is rare; else correct the named cause. Adapters need the same ``model.path``.
    """

    engine: str
    epoch: int
    version: int
    detail: str

    def __str__(self) -> str:
        return (
            f"{self.engine} did not load weight version {self.version} (sync epoch "
            f"{self.epoch}): {self.detail}"
        )


class BaseRefused(OffbeatError):
    """An engine does not serve the base of a delta, so it is unchanged and needs the full release.

    Fix: none: the engine gets the full release.
    """

    engine: str
    version: int
    base: str
    served: str | None

    def __str__(self) -> str:
        serves = "serves no release of this run" if self.served is None else f"serves {self.served}"
        return (
            f"{self.engine} {serves}; the delta of version {self.version} applies to {self.base}. "
            "It takes the full release"
        )


class ReleaseLost(OffbeatError):
    """The published weights were lost with their machine or process. The engine is healthy.

    The trainer must publish them again.

    Fix: none: the trainer publishes the weights again.
    """

    engine: str
    version: int
    detail: str

    def __str__(self) -> str:
        return (
            f"the published weights of version {self.version} were lost before {self.engine} had "
            f"received them: {self.detail}"
        )


class CanaryFailed(WeightSyncFailed):
    """An engine received a release intact, but its log-probabilities differ from the trainer's.

    Fix: none: the engine is synced once more, then replaced.
    """

    detail: str = field(init=False)
    token: int
    engine_logprob: float
    trainer_logprob: float
    gap: float
    tolerance: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.detail = (
            f"the bytes match the release, but the engine's logprob of token {self.token} is "
            f"{self.engine_logprob:.4g} and the trainer's is {self.trainer_logprob:.4g}: "
            f"{self.gap:.3g} nats apart, {self.tolerance:g} are allowed"
        )


class InitialWeightsChanged(OffbeatError):
    """The weights at ``model.path`` have changed since the run began.

    Fix: put the weights back, or start a new run.
    """

    began: str
    found: str

    def __str__(self) -> str:
        return (
            f"model.path has weights {self.found}, but this run began with {self.began}: a "
            "rewind to its start and the KL reference would use a different model. Restore the "
            "original weights, or start a new run"
        )


class SchemaError(OffbeatError):
    """A column of a payload violates the schema.

    Fix: return the columns that the message names. If your code does not make them, report a bug.
    """

    column: str
    got: str
    want: str

    def __str__(self) -> str:
        return f"column {self.column!r} is {self.got}; the schema wants {self.want}"

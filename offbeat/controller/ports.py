"""Defines the Protocols of everything that the controller calls.

In production these are Ray actors behind thin adapters. In tests and in the simulator they are
fakes on a virtual clock. An implementation of a port raises the classes of
``offbeat.messages.failures``. ``ActorLost`` means that a process is gone. ``RolloutFailed``,
``TrainStepFailed`` and ``WeightSyncFailed`` mean that work failed in a living process.
``UnfitGroup`` means that a trainer cannot read a group. ``PayloadLost`` and ``ReleaseLost`` mean
that data died with the machine that held it, while the callee is healthy. Any other error is a bug
and ends the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from offbeat.config.loss_spec import LossSpec
from offbeat.controller.events import Event
from offbeat.controller.failpoints import Failpoints, no_failpoints
from offbeat.controller.ledger import StepsAfter
from offbeat.controller.run_stats import RunStats
from offbeat.messages.evaluations import EvaluatedVersion
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck
from offbeat.messages.worker_report import OnJoined, OnLost, OnReport
from offbeat.telemetry.step_samples import StepSamples

Lane = tuple[Literal["pump", "engine", "rank", "group"], str]


class Prompts(Protocol):
    """Prompts in a fixed, endless order."""

    def prompt(self, prompt_index: int) -> Prompt | None:
        """Return the prompt at an index, always the same, or None past the end of the data.

        Pure.
        """
        ...


class Rollouts(Protocol):
    """All environment workers, seen as one."""

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        """Roll out one group. Return its receipt and the opaque handle of its payload.

        Cancelling the call cancels the work on the other side.

        Raises:
            RolloutFailed: The rollout failed. Its ``kind`` tells whether a retry may help.
            ActorLost: The worker that had the group is gone.
        """
        ...

    async def close(self) -> None:
        """Release the workers' resources. Nothing else is called afterwards.

        Closing a worker that is already gone is not an error.
        """
        ...


class ReportingRollouts(Rollouts, Protocol):
    """Environment workers that also report on their processes, on the controller's event loop."""

    def report_joined(self, on_joined: OnJoined) -> None:
        """Set the callback for the first reply of each worker process."""
        ...

    def report_lost(self, on_lost: OnLost) -> None:
        """Set the callback for each lost worker process, called before its groups fail."""
        ...

    def report_to(self, on_report: OnReport) -> None:
        """Set the callback for the report in each reply of a worker."""
        ...


class Generator(Protocol):
    """One inference engine: its weights and health. The name outlives the engine's processes."""

    @property
    def name(self) -> str:
        """Return the name under which tasks, pins and events refer to the engine."""
        ...

    async def state(self, fence: Fence) -> EngineState:
        """Return the served version, the load and the incarnation. Change nothing.

        Raises:
            ActorLost: The process is gone or not up yet.
            EngineUnavailable: The process answers, but its engine is broken for good.
            StartFailed: The process could not be set up, and another start would fail too.
        """
        ...

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        """Receive, verify and serve a release. On any error keep serving the former weights.

        If a release has a delta, only the delta is received.

        Raises:
            BaseRefused: The release has a delta, and the engine does not serve its base.
            WeightSyncFailed: The engine could not load the release.
            CanaryFailed: The engine loaded the release, but its log-probabilities differ from the
                trainer's.
            ReleaseLost: The release died with the machine that held it. The engine is healthy.
            ActorLost: The process is gone.
            EngineUnavailable: The process answers, but its engine is broken.
        """
        ...

    async def restart(self) -> None:
        """Kill the process and return at once. The process's owner starts a new one."""
        ...

    async def retire(self) -> None:
        """Kill the process for good and return at once. ``close`` may follow."""
        ...

    async def close(self) -> None:
        """Release the engine's resources. Nothing else is called afterwards.

        Closing an engine that is already gone is not an error.
        """
        ...


class Trainer(Protocol):
    """All trainer ranks, seen as one. Calls of a step are served in the order they are made.

    Every call except ``restart`` and ``close`` raises ``ActorLost`` if a rank is gone or has lost
    contact with the others. It raises ``StaleFence`` if the ranks have seen a higher fence. If a
    call of a step repeats a key that was answered before, it does nothing and returns the same
    answer.
    """

    async def state(self, fence: Fence) -> TrainerState:
        """Return the ranks' version, their last applied step and attempt, and their incarnation.

        Raises:
            ActorLost: The ranks are gone or not up yet.
            StartFailed: A rank could not be set up, and another start would fail the same way.
        """
        ...

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        """Compute the logprob columns that ``loss`` needs, for each group of the chunk.

        Uses the weights of the present version. It works whether or not a step is open.

        Raises:
            TrainStepFailed: A living rank could not compute them.
            UnfitGroup: A group has columns that cannot be read.
            PayloadLost: The columns of some groups are gone.
        """
        ...

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        """Open the step after the present version, with zero gradients.

        Raises:
            StepAlreadyOpen: Another step is open.
            StepOutOfOrder: The ranks do not hold the version that precedes this step.
            TrainStepFailed: A living rank could not begin.
        """
        ...

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        """Accumulate the gradient of a chunk's groups into the open step.

        Raises:
            StepOutOfOrder: The key is not the next one of the open step, or an earlier call failed.
            TrainStepFailed: A living rank could not compute it. The step can only be aborted.
            UnfitGroup: A group has columns that cannot be read. The step can only be aborted.
            PayloadLost: The columns of some groups are gone. The step can only be aborted.
        """
        ...

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        """Apply the open step's gradient once and close the step, on all ranks or on no rank.

        The answer tells whether the gradient was applied. If not, the weights are the same as
        before the step.

        Raises:
            StepOutOfOrder: The key is not the next one of the open step, or an earlier call failed.
            TrainStepFailed: A rank failed. It is unknown whether other ranks have applied the step.
        """
        ...

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        """Close the open step and drop its gradients. Weights and version stay.

        Without an open step the call has no effect.

        Raises:
            TrainStepFailed: A living rank could not abort. It is unknown what it still holds of the
                step.
        """
        ...

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        """Return a snapshot of the present weights. Training may continue at once.

        Raises:
            TrainStepFailed: The ranks hold a different version, or cannot send any more.
        """
        ...

    async def save(self, fence: Fence, step: int) -> None:
        """Write the model after ``step`` to the run's checkpoints, completely or not at all.

        Raises:
            CheckpointFailed: It could not be written. Earlier checkpoints remain complete.
            TrainStepFailed: The ranks hold a different version.
        """
        ...

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        """Save this version so that ``restore`` can load it, completely or not at all.

        Returns once the checkpoint is complete and durable. No step may be open.

        Raises:
            CheckpointFailed: It could not be written. Earlier checkpoints remain complete.
            TrainStepFailed: The ranks hold a different version.
        """
        ...

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        """Restore the newest valid checkpoint of version ``at_most`` or older.

        If there is none, the ranks hold the initial model (version 0). No step is open afterwards.

        Raises:
            CheckpointFailed: A valid checkpoint could not be loaded.
        """
        ...

    async def restart(self) -> None:
        """Kill all ranks and return at once. The ranks' owner starts new ones."""
        ...

    async def close(self) -> None:
        """Release the ranks' resources. Nothing else is called afterwards.

        Closing a rank that is already gone is not an error.
        """
        ...


class Journal(Protocol):
    """Durable record of the ledger's events, in order."""

    @property
    def stats(self) -> RunStats:
        """Return the figures of all events so far, including former controllers."""
        ...

    def append(self, event: Event) -> None:
        """Queue an event. Never blocks the event loop, nor raises if the disk is slow or failed."""
        ...

    async def barrier(self) -> None:
        """Return once everything appended so far would survive a crash.

        Raises:
            JournalFailed: The disk refused. Every later barrier raises it too.
            JournalTaken: A newer controller writes this journal.
        """
        ...

    async def steps_after(self, version: int) -> StepsAfter:
        """Find the steps that a rewind to ``version`` undoes. May read all of the journal.

        Raises:
            JournalFailed: The disk refused.
            JournalCorrupt: A segment is damaged or missing.
        """
        ...


class TelemetryPort(Protocol):
    """Receives measurements. Never blocks, never raises."""

    def emit(
        self,
        step: int,
        version: int,
        metrics: Mapping[str, float],
        samples: Callable[[], StepSamples] | None = None,
    ) -> None:
        """Emit the metrics of a step, under names of the metric table.

        ``samples`` computes the samples of the step. It is called only if a tracker shows samples.
        """
        ...


class Trace(Protocol):
    """Receives the run's timeline. Never blocks, never raises.

    A lane is ``(kind, name)``: a pump, an engine, a trainer rank, or a prompt group. Times are
    seconds on the event loop's clock. Spans of one lane may overlap.
    """

    def span(
        self, lane: Lane, name: str, start_s: float, end_s: float, **facts: str | float
    ) -> None:
        """Record an activity that lasted from ``start_s`` to ``end_s``."""
        ...

    def mark(self, lane: Lane, name: str, at_s: float, **facts: str | float) -> None:
        """Record an event at one moment: a fault, a served version."""
        ...


class Payloads(Protocol):
    """Payloads that have survived the process that owned them."""

    def readable(self, receipt: Receipt) -> object | None:
        """Return a handle of the payload of this receipt, or None if it is lost.

        Prompt index and attempt do not identify a payload, because a dispatch that was lost in a
        crash is repeated with the same numbers.
        """
        ...

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        """Return the prompt indices of those given groups whose payload is known to be lost."""
        ...


class NoTrace:
    """Discards the timeline."""

    def span(
        self, lane: Lane, name: str, start_s: float, end_s: float, **facts: str | float
    ) -> None: ...
    def mark(self, lane: Lane, name: str, at_s: float, **facts: str | float) -> None: ...


class NoPayloads:
    """Stand-in for runs without a spool: no payload survives its owner."""

    def readable(self, receipt: Receipt) -> object | None:
        del receipt
        return None

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        del payloads
        return set()


class EvaluationLog(Protocol):
    """Durable record of evaluations. Never blocks, never raises."""

    def has(self, due: int) -> bool:
        """Return whether the evaluation that was due at a version is recorded."""
        ...

    def take(self, evaluated: EvaluatedVersion) -> None:
        """Record an evaluation, in place of an earlier one that was due at the same version."""
        ...


class NoEvaluationLog:
    """Stand-in that records nothing and treats every evaluation as recorded."""

    def has(self, due: int) -> bool:
        del due
        return True

    def take(self, evaluated: EvaluatedVersion) -> None:
        del evaluated


def no_cpu_clock() -> float:
    """Return 0. This is the clock if nobody reads the CPU time of the process."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Ports:
    """All dependencies of the controller."""

    prompts: Prompts
    rollouts: Rollouts
    generators: Mapping[str, Generator]
    trainer: Trainer
    journal: Journal
    telemetry: TelemetryPort
    trace: Trace
    payloads: Payloads
    failpoints: Failpoints = no_failpoints
    cpu_s: Callable[[], float] = no_cpu_clock
    """Returns the CPU seconds of the controller's own process since its start."""
    evaluation: Mapping[str, Prompts] = field(default_factory=dict[str, Prompts])
    """Prompts that are scored, never trained, by the name of their set."""
    scores: EvaluationLog = field(default_factory=NoEvaluationLog)

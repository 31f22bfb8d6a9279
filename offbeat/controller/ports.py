"""What the controller needs from the outside world, and nothing more.

In production these are Ray actors behind thin adapters; in tests and in the simulator, fakes on a
virtual clock. Whoever implements a port raises the failures of ``offbeat.messages.failures``,
classified: ``ActorLost`` for a process that is gone, ``RolloutFailed``, ``TrainStepFailed``,
``WeightSyncFailed`` for work that failed in a living one, ``UnfitGroup`` for a group that a trainer
cannot read, ``PayloadLost`` and ``ReleaseLost`` for what died with the machine that held it while
the callee is well. Anything else is a bug and ends the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from offbeat.controller.events import Event
from offbeat.controller.failpoints import Failpoints, no_failpoints
from offbeat.controller.steps_after import StepsAfter
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    LossSpec,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck

Lane = tuple[Literal["pump", "engine", "rank", "group"], str]


class Prompts(Protocol):
    """The endless prompt order."""

    def prompt(self, ordinal: int) -> Prompt | None:
        """The prompt at a place, always the same one; None past the end of the data. Pure."""
        ...


class Rollouts(Protocol):
    """All environment workers, seen as one."""

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        """A finished group: its receipt, and the opaque handle of its payload."""
        ...

    async def close(self) -> None:
        """Close all environment workers. A worker that is already gone is no failure."""
        ...


class Generator(Protocol):
    """One inference engine, as far as weights and health go."""

    @property
    def name(self) -> str:
        """Return the engine's name, one per run and the same in every incarnation."""
        ...

    async def state(self, fence: Fence) -> EngineState:
        """Report incarnation, served weight version, digest and load, at the time of the call."""
        ...

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        """Take, verify and serve a release: wholly, or raise and serve nothing new."""
        ...

    async def restart(self) -> None:
        """Kill the process; whoever owns it starts a new one. Returns without waiting for that."""
        ...

    async def retire(self) -> None:
        """Kill the process for good. Returns without waiting for that; ``close`` may follow."""
        ...

    async def close(self) -> None:
        """Close the engine. A process that is already gone is no failure."""
        ...


class Trainer(Protocol):
    """All trainer ranks, seen as one. Calls of a step are served in the order they are made."""

    async def state(self, fence: Fence) -> TrainerState:
        """Report incarnation, weight version, digest and step counters of the ranks."""
        ...

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        """Compute the log-probabilities of ``chunk`` under the current weights; train nothing."""
        ...

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        """Open the step ``key``. Its gradients are zero, and no other step is open."""
        ...

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        """Add the gradients of ``chunk`` to the open step. After a failure the step must be aborted."""
        ...

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        """Update the weights by the gradients of the open step and close it.

        The result says whether the optimizer applied the step. A step that was not applied leaves
        weights and version as they were.
        """
        ...

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        """Close the step ``key`` and discard its gradients; weights and version stay."""
        ...

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        """A snapshot of the weights as they are now; the trainer may go on at once."""
        ...

    async def save(self, fence: Fence, step: int) -> None:
        """Write the model as it is after ``step`` into the run's checkpoints, whole or not at all."""
        ...

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        """Write everything ``restore`` needs of this version to disk, whole or not at all.

        The answer comes once it is complete and durable. No step is open.
        """
        ...

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        """Go back to the newest checkpoint that verifies, of version ``at_most`` or older.

        Without one the ranks hold the initial model: version 0. No step is open afterwards.
        """
        ...

    async def restart(self) -> None:
        """Kill all ranks; whoever owns them starts new ones. Returns without waiting for that."""
        ...

    async def close(self) -> None:
        """Close all ranks. A rank that is already gone is no failure."""
        ...


class Journal(Protocol):
    """Where the ledger's events go, in order."""

    def append(self, event: Event) -> None:
        """Take an event. Never blocks the loop, never raises for a slow disk."""
        ...

    async def barrier(self) -> None:
        """Return once everything appended so far would survive a crash."""
        ...

    async def steps_after(self, version: int) -> StepsAfter:
        """Find the steps that a rewind to ``version`` undoes. May read all of the journal."""
        ...


class TelemetryPort(Protocol):
    """Where measurements go. Never blocks, never raises."""

    def emit(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Record ``metrics``, by name, at training step ``step`` and weight version ``version``."""
        ...


class Trace(Protocol):
    """Where the run's timeline goes. Never blocks, never raises.

    A lane is ``(kind, name)``: a pump, an engine, a trainer rank, or a prompt group. Times are of the
    event loop's clock, in seconds. Spans of one lane may overlap.
    """

    def span(
        self, lane: Lane, name: str, start_s: float, end_s: float, **facts: str | float
    ) -> None:
        """Something that took from ``start_s`` to ``end_s``."""
        ...

    def mark(self, lane: Lane, name: str, at_s: float, **facts: str | float) -> None:
        """Something that happened at one moment: a fault, a served version."""
        ...


class Payloads(Protocol):
    """What is left of payloads whose process or machine died."""

    def readable(self, receipt: Receipt) -> object | None:
        """A handle of the payload that this very receipt vouches for; None when it is gone.

        Ordinal and attempt alone do not name it: a dispatch that a crash forgot is made again.
        """
        ...

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        """Groups of these, by ordinal, with a payload that is known to be gone by now."""
        ...


class NoTrace:
    """Keeps no timeline."""

    def span(
        self, lane: Lane, name: str, start_s: float, end_s: float, **facts: str | float
    ) -> None: ...
    def mark(self, lane: Lane, name: str, at_s: float, **facts: str | float) -> None: ...


class NoPayloads:
    """Payloads live and die with the controller that holds them."""

    def readable(self, receipt: Receipt) -> object | None:
        del receipt
        return None

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        del payloads
        return set()


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything outside the controller."""

    prompts: Prompts
    rollouts: Rollouts
    generators: Mapping[str, Generator]
    trainer: Trainer
    journal: Journal
    telemetry: TelemetryPort
    trace: Trace
    payloads: Payloads
    failpoints: Failpoints = no_failpoints
    evaluation: Prompts | None = None  # prompts that are scored, never trained

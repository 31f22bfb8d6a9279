"""Journal records: each move of prompt groups, and what happened to the processes of a run.

The group table is the fold of these records, and the journal is their file. A record is encoded as
an array whose last item is the time. New kinds of records, and new fields with defaults at the end
of a struct inside a record (such as the receipt), need no new version. Any other change raises
``SCHEMA``.

Unless a field says otherwise, ``version`` is the number of optimizer steps applied, ``step`` and
``attempt`` count from 1, ``attempt`` counts the tries of the step or of the group, and ``digest``
identifies weights.
"""

import enum
from typing import Final

import msgspec

from offbeat.messages.failures import Component
from offbeat.messages.groups import Receipt

SCHEMA: Final = 4
"""Version of these records. Journals of other versions are refused."""


class ReturnKind(enum.StrEnum):
    """Reason to roll out a group again. It selects the budget that the return counts against."""

    INFRASTRUCTURE = "infrastructure"  # a retry on another engine, or later, may succeed
    DATA = "data"  # this prompt could not be rolled out, or trained
    OUTAGE = "outage"  # the environment is out of service: counts against no budget
    EVICTED = "evicted"  # it was ready, and became too old
    CANCELLED = "cancelled"  # it was in flight, and was stopped
    RECOVERED = "recovered"  # a former controller had dispatched it, or its room was needed


class DropReason(enum.StrEnum):
    """Reason to drop a prompt."""

    DATA = "data"  # its data failed more often than rollout.data_retries
    INFRASTRUCTURE = "infrastructure"  # likewise, rollout.infrastructure_retries
    FILTERED = "filtered"  # by a filter of the recipe
    STALE = "stale"  # it became too old, and the recipe allows no further attempt
    STEP_NOT_APPLIED = "step_not_applied"  # the optimizer refused the step that it was in


class Event(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False, kw_only=True):
    """Base class of journal records.

    Instances are never part of a reference cycle, so they are exempt from garbage collection.
    """

    unix_s: float = 0.0  # time of the append, 0 if unknown; the group table ignores it


# --- incarnations of the controller ----------------------------------------------------------------------


class Opened(Event, frozen=True):
    """First record of each incarnation of the controller."""

    run_id: str
    incarnation: int
    driver: str = ""  # process that started it; a change means that the run was resumed


class UndoneStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An applied step that a rewind undoes, with all data needed to revert it."""

    version: int  # version that the step led to
    prompt_indices: tuple[int, ...]
    attempts: tuple[int, ...]  # of each group, as trained
    has_target_step: bool  # whether its groups were bound to it
    batch_deficit: int  # groups missing from its batch
    staleness: tuple[tuple[int, int], ...]  # (versions behind, samples)


class Rewound(Event, frozen=True):
    """The trainer was restored to an older version: a new lineage begins.

    Groups trained since then return to admitted. A ready group returns, too, if it has a token of
    an undone version, because that number will refer to different weights. The record contains the
    undone steps. So neither the group table nor a snapshot has to keep the groups of each step.

    A long rewind is split into several records of one lineage, newest steps first, so that no
    record blocks the controller for long. If a controller dies between them, the next controller
    continues.
    """

    to_version: int
    lineage: int
    reason: str
    undone: tuple[UndoneStep, ...] = ()  # by ascending version
    rewards: tuple[float, ...] = ()  # mean rewards of the last remaining steps, oldest first
    rewinding_to: int | None = (
        None  # what the trainer holds, where this is only a part: more follow
    )

    @property
    def target(self) -> int:
        """Return the version that the whole rewind leads to."""
        return self.to_version if self.rewinding_to is None else self.rewinding_to


# --- prompt groups ---------------------------------------------------------------------------------


class Admitted(Event, frozen=True):
    """A prompt was admitted.

    Its data is a pure function of the prompt index and is not stored here.
    """

    prompt_index: int
    target_step: int | None  # None: any step may train it


class Dispatched(Event, frozen=True):
    """A group moves from admitted to in flight."""

    prompt_index: int
    attempt: int
    engine: str
    version: int  # the engine's acked version: no token can be older


class Returned(Event, frozen=True):
    """A group moves from in flight or ready back to admitted: it will be rolled out again."""

    prompt_index: int
    attempt: int
    kind: ReturnKind
    reason: str  # a counter's name: reward_raised, engine_lost, payload_lost, ...


class Committed(Event, frozen=True):
    """A group moves from in flight to ready."""

    receipt: Receipt


class Claimed(Event, frozen=True):
    """Groups move from ready to training, in this order."""

    step: int
    attempt: int
    prompt_indices: tuple[int, ...]


class Unclaimed(Event, frozen=True):
    """An open step was aborted. Its groups move from training to ready."""

    step: int
    attempt: int


class Dropped(Event, frozen=True):
    """A prompt is dropped. Its group leaves the table for good."""

    prompt_index: int
    reason: DropReason
    detail: str = ""  # a counter's name: what failed, or which filter
    shrinks: int = 0  # step that is trained with one group less; 0: none

    @property
    def label(self) -> str:
        """Return the name under which the drop is counted."""
        return self.detail or self.reason


# --- steps and weights -----------------------------------------------------------------------------


class StepIntent(Event, frozen=True):
    """Intent to finish a step, durable before the trainer is called.

    After a crash it is unknown whether its groups were trained. Recovery asks the trainer.
    """

    step: int
    attempt: int
    prompt_indices: tuple[int, ...]


class StepApplied(Event, frozen=True):
    """A step was applied: its groups leave the table, and ``version`` is the trainer version.

    The record is self-contained. Undoing or reporting the step needs no earlier record.
    """

    step: int
    attempt: int
    version: int
    prompt_indices: tuple[int, ...]
    frontier: int  # prompt indices drawn so far
    attempts: tuple[int, ...] = ()  # of each group, as trained
    has_target_step: bool = False  # its groups were bound to this step
    batch_deficit: int = 0  # groups missing from its batch
    samples: int = 0  # valid samples
    tokens: int = 0  # prompt and response tokens
    reward: float = 0.0  # mean over the samples
    staleness: tuple[tuple[int, int], ...] = ()  # (versions behind, samples)
    masked_samples: int = 0  # on top of the valid ones

    def undone(self) -> UndoneStep:
        """Return the part of this record that a rewind stores."""
        return UndoneStep(
            self.version,
            self.prompt_indices,
            self.attempts,
            has_target_step=self.has_target_step,
            batch_deficit=self.batch_deficit,
            staleness=self.staleness,
        )


class StepRefused(Event, frozen=True):
    """The optimizer did not apply the step. Its groups are dropped as STEP_NOT_APPLIED.

    The batch is used up. Each group bound to a later step is now bound to the step before that.
    """

    step: int
    attempt: int
    reason: str  # reason of the trainer, for messages


class Checkpointed(Event, frozen=True):
    """The trainer's complete state of this version is on disk and verified."""

    version: int
    digest: str


class Released(Event, frozen=True):
    """The trainer published a version. Generators that serve it have acked this digest."""

    version: int
    digest: str


class Served(Event, frozen=True):
    """An engine acked a release and may now get work."""

    engine: str
    incarnation: str
    epoch: int
    version: int
    digest: str


# --- what the run costs ----------------------------------------------------------------------------


class Joined(Event, frozen=True):
    """A process of an engine, a worker or the trainer answered for the first time.

    A worker's first reply after each ``WorkerLost`` is recorded too: the worker is back, or was
    replaced.
    """

    component: Component
    name: str
    incarnation: str  # incarnation of the process; a change means that it was replaced
    initial_weights: str = ""  # for the trainer: digest of the weights at model.path


class EngineLost(Event, frozen=True):
    """An engine's process was given up: dead, silent or failing. ``Served`` records its return."""

    engine: str
    reason: str


class WorkerLost(Event, frozen=True):
    """An environment worker's process died, hangs or was replaced. ``Joined`` records its return.

    Each ``Joined`` of a replacement process is preceded by one such record.
    """

    worker: str
    reason: str


class Retired(Event, frozen=True):
    """An engine was retired. None of its processes is started until the run is resumed."""

    engine: str
    reason: str  # its last failure


class TrainerReplaced(Event, frozen=True):
    """The trainer's ranks were lost and are replaced."""

    reason: str
    found: bool = False  # by a new controller: they were lost before it started


class Spent(Event, frozen=True):
    """Time by cause since this incarnation's previous ``Spent`` record. One record per step."""

    trainer: dict[str, float]  # seconds by TrainerTime
    engines: dict[str, float]  # of all engines together, by GeneratorTime
    generate_s: float = 0.0  # seconds of a group in its engine, mean over the step
    reward_s: float = 0.0  # seconds of a group in environment and reward, mean over the step
    syncs: int = 0


class RewardCallsMade(Event, frozen=True):
    """A worker's process reported how many calls of reward functions it has made so far."""

    process: str  # incarnation of the worker
    calls: int  # since it started, tries included


CostEvent = Joined | EngineLost | WorkerLost | Retired | TrainerReplaced | Spent | RewardCallsMade
"""Records of the run's costs. They move no group."""

AnyEvent = (
    Opened
    | Joined
    | EngineLost
    | WorkerLost
    | Retired
    | TrainerReplaced
    | Spent
    | RewardCallsMade
    | Rewound
    | Admitted
    | Dispatched
    | Returned
    | Committed
    | Claimed
    | Unclaimed
    | Dropped
    | StepIntent
    | StepApplied
    | StepRefused
    | Checkpointed
    | Released
    | Served
)

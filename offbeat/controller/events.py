"""The moves of prompt groups, as records: the ledger is their fold, the journal their file.

Encoded as arrays, the time last. A struct inside a record, as the receipt, may get fields at its end
that have defaults, and a new kind of record may be added. Any other change raises ``SCHEMA``.
"""

import enum
from typing import Final

import msgspec

from offbeat.messages.failures import Component
from offbeat.messages.groups import Receipt

SCHEMA: Final = 4
"""Version of these records; a journal of another one is refused."""


class ReturnKind(enum.StrEnum):
    """Reason to roll a group out again; it decides which budget the return counts against."""

    INFRASTRUCTURE = "infrastructure"  # a retry on another engine, or later, may succeed
    DATA = "data"  # this prompt could not be rolled out, or trained
    OUTAGE = "outage"  # the environment is out of service: nobody's budget
    EVICTED = "evicted"  # it was ready, and grew too old
    CANCELLED = "cancelled"  # it was in flight, and was stopped
    RECOVERED = "recovered"  # a former controller had it, or its place was needed


class DropReason(enum.StrEnum):
    """Reason to give a prompt up."""

    DATA = "data"  # its data failed more often than rollout.data_retries
    INFRASTRUCTURE = "infrastructure"  # likewise, rollout.infrastructure_retries
    FILTERED = "filtered"  # by a filter of the recipe
    STALE = "stale"  # it grew too old, and the recipe asks for no further attempt
    STEP_NOT_APPLIED = "step_not_applied"  # the optimizer refused the step that it was in


class Event(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False, kw_only=True):
    """Base class of journal records.

    Instances are part of no cycle, so they are exempt from garbage collection.
    """

    unix_s: float = 0.0  # when the journal took it, 0 if unknown; the group table ignores it


# --- incarnations of the controller ----------------------------------------------------------------------


class Opened(Event, frozen=True):
    """Starts each incarnation of the controller; it is its first record."""

    run_id: str
    incarnation: int
    driver: str = ""  # the process that started it; another one than before: the run was resumed


class UndoneStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Describes an applied step that a rewind undoes, with all that is needed to revert it."""

    version: int  # it made
    prompt_indices: tuple[int, ...]
    attempts: tuple[int, ...]  # of each group, as trained
    has_target_step: bool  # its groups were bound to it
    batch_deficit: int  # groups it went without
    staleness: tuple[tuple[int, int], ...]  # (versions behind, samples)


class Rewound(Event, frozen=True):
    """Records that the trainer was restored to an older version: a new lineage begins.

    What was trained since goes back to admitted. So does a ready group with a token of an abandoned
    version: the number will mean other weights. The record says itself what it undoes, so that
    neither the group table nor a snapshot remembers which groups each step has trained.

    A long rewind is several of these records, newest steps first and all of one lineage, so that
    none of them takes the controller long. A controller that dies between them is followed by one
    that goes on.
    """

    to_version: int
    lineage: int
    reason: str
    undone: tuple[UndoneStep, ...] = ()  # by version, rising
    rewards: tuple[float, ...] = ()  # mean rewards of the last steps that stand, oldest first
    rewinding_to: int | None = (
        None  # what the trainer holds, where this is only a part: more follow
    )

    @property
    def target(self) -> int:
        """Version that the whole rewind ends at."""
        return self.to_version if self.rewinding_to is None else self.rewinding_to


# --- prompt groups ---------------------------------------------------------------------------------


class Admitted(Event, frozen=True):
    """A prompt was drawn. Its data is a pure function of the prompt index and is not kept here."""

    prompt_index: int
    target_step: int | None  # None: any step may train it


class Dispatched(Event, frozen=True):
    """Admitted -> in flight."""

    prompt_index: int
    attempt: int
    engine: str
    version: int  # the engine's acked version: no token can be older


class Returned(Event, frozen=True):
    """Moves a group from in flight or ready back to admitted: it will be rolled out again."""

    prompt_index: int
    attempt: int
    kind: ReturnKind
    reason: str  # a counter's name: reward_raised, engine_lost, payload_lost, ...


class Committed(Event, frozen=True):
    """Moves a group from in flight to ready."""

    receipt: Receipt


class Claimed(Event, frozen=True):
    """Ready -> training, in this order."""

    step: int
    attempt: int
    prompt_indices: tuple[int, ...]


class Unclaimed(Event, frozen=True):
    """An open step was aborted: its groups are ready again."""

    step: int
    attempt: int


class Dropped(Event, frozen=True):
    """A prompt is given up. ``shrinks`` is the step that goes without it, 0 for none."""

    prompt_index: int
    reason: DropReason
    detail: str = ""  # a counter's name: what failed, or which filter
    shrinks: int = 0

    @property
    def label(self) -> str:
        """Return the name under which the drop is counted."""
        return self.detail or self.reason


# --- steps and weights -----------------------------------------------------------------------------


class StepIntent(Event, frozen=True):
    """Durable before finish is sent: these groups may have been trained if we die now."""

    step: int
    attempt: int
    prompt_indices: tuple[int, ...]


class StepApplied(Event, frozen=True):
    """Records an applied step.

    Its version, its trained groups and the frontier of the prompt source.

    It holds what a rewind needs to undo the step, and what a summary says of it; no
    record before it is needed to read it.
    """

    step: int
    attempt: int
    version: int
    prompt_indices: tuple[int, ...]
    frontier: int  # prompt indices drawn so far
    attempts: tuple[int, ...] = ()  # of each group, as trained
    has_target_step: bool = False  # its groups were bound to this step
    batch_deficit: int = 0  # groups it went without
    samples: int = 0  # valid
    tokens: int = 0  # prompt and response
    reward: float = 0.0  # mean over the samples
    staleness: tuple[tuple[int, int], ...] = ()  # (versions behind, samples)
    masked_samples: int = 0  # on top of the valid ones

    def undone(self) -> UndoneStep:
        """Return what a rewind writes down of this step."""
        return UndoneStep(
            self.version,
            self.prompt_indices,
            self.attempts,
            has_target_step=self.has_target_step,
            batch_deficit=self.batch_deficit,
            staleness=self.staleness,
        )


class StepRefused(Event, frozen=True):
    """The optimizer did not apply the step; its groups are dropped as STEP_NOT_APPLIED."""

    step: int
    attempt: int
    reason: str  # the trainer's, for people


class Checkpointed(Event, frozen=True):
    """The trainer's whole state of this version is on disk, complete and verified."""

    version: int
    digest: str


class Released(Event, frozen=True):
    """The trainer published a version; generators that serve it have acked this digest."""

    version: int
    digest: str


class Served(Event, frozen=True):
    """An engine acked a release: from here on it may be given work."""

    engine: str
    incarnation: str
    epoch: int
    version: int
    digest: str


# --- what the run costs ----------------------------------------------------------------------------


class Joined(Event, frozen=True):
    """A process of an engine, a worker or the trainer answered for the first time."""

    component: Component
    name: str
    incarnation: str  # of the process: another one than before took its place
    initial_weights: str = ""  # of the trainer: digest of what model.path held


class Retired(Event, frozen=True):
    """Records that an engine is retired: no process of it is started until the run is resumed."""

    engine: str
    reason: str  # its last failure


class TrainerReplaced(Event, frozen=True):
    """The trainer's ranks were lost, and others take their place."""

    reason: str
    found: bool = False  # by a controller that took over: they were lost before it began


class Spent(Event, frozen=True):
    """Records where the time since the previous such record of this incarnation went.

    One per step.
    """

    trainer: dict[str, float]  # seconds by TrainerTime
    engines: dict[str, float]  # of all engines together, by GeneratorTime
    generate_s: float = 0.0  # of a group in its engine, a mean over the step
    reward_s: float = 0.0  # the same in environment and reward
    syncs: int = 0


AnyEvent = (
    Opened
    | Joined
    | Retired
    | TrainerReplaced
    | Spent
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

"""Defines the records that the fake actors of an episode write, in the order of events.

The controller never sees these. Together with its journal they are all the auditor reads.
"""

import msgspec

from offbeat.messages.groups import VersionSpans


class WorldRecord(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class of records. ``at`` is virtual time in seconds."""

    at: float


class Fault(WorldRecord, frozen=True):
    """Records that a fault fired: its effect was visible to an actor."""

    kind: str  # a name of offbeat.simulation.faults
    target: str
    detail: str = ""


class ControllerStarted(WorldRecord, frozen=True):
    """A controller begins."""

    incarnation: int


class ControllerEnd(WorldRecord, frozen=True):
    """Records the end of a controller incarnation."""

    incarnation: int
    outcome: str  # finished | failed | aborted | killed
    error: str = ""  # one line, as its operator reads it
    cause: str = ""  # class name of the first cause


class Generated(WorldRecord, frozen=True):
    """A worker finished a group and sent it; it may never arrive."""

    prompt_index: int
    attempt: int
    engine: str
    life: str
    spans: tuple[VersionSpans, ...]  # one entry a sample, as the engine stamped them
    poison: str = ""  # what is wrong with it, empty for an honest group
    machine: str = ""  # that holds its payload
    spooled: bool = False  # a copy of the payload is in the run directory


class Scored(WorldRecord, frozen=True):
    """A worker finished a group of an evaluation: scored, never trained."""

    prompt_index: int  # in the evaluation's own source
    attempt: int
    engine: str
    life: str
    spans: tuple[VersionSpans, ...]
    poison: str = ""


class EngineServes(WorldRecord, frozen=True):
    """An engine has verified weights and decodes with them from now on."""

    engine: str
    life: str
    epoch: int
    version: int
    digest: str


class MachineLost(WorldRecord, frozen=True):
    """A machine died, or was cut off, with all that it held.

    When that began, and when it was given up.
    """

    machine: str
    actors: tuple[str, ...]  # that lived on it


class EngineComputesOther(WorldRecord, frozen=True):
    """An engine took a release whole, and what it computes with is not that."""

    engine: str
    life: str
    epoch: int
    version: int


class EngineDied(WorldRecord, frozen=True):
    """Records the end of an engine incarnation."""

    engine: str
    life: str


class TrainerLife(WorldRecord, frozen=True):
    """The ranks begin, with the initial model."""

    life: int


class TrainerRestored(WorldRecord, frozen=True):
    """The ranks hold this version again."""

    life: int
    version: int
    digest: str


class TrainerApplied(WorldRecord, frozen=True):
    """The optimizer stepped, wholly: the trainer's own account of what it trained."""

    life: int
    step: int
    attempt: int
    version: int  # it made
    prompt_indices: tuple[int, ...]
    attempts: tuple[int, ...]  # of the groups, as their payload says
    oldest: tuple[int, ...]  # version of the oldest token of each group, as its payload says
    newest: tuple[int, ...]
    poison: tuple[str, ...]  # of the groups; empty strings when all are honest
    digest: str  # of the weights after it


class ReleasePublished(WorldRecord, frozen=True):
    """The trainer made a release of the weights it holds."""

    life: int
    version: int
    digest: str


class CheckpointWritten(WorldRecord, frozen=True):
    """A checkpoint is complete on disk and durable."""

    version: int
    digest: str


class CheckpointLatest(WorldRecord, frozen=True):
    """Records what LATEST names, after every change of it or of its target."""

    version: int
    verifies: bool


class FenceRefused(WorldRecord, frozen=True):
    """An actor refused a call of an older controller."""

    actor: str
    got: int
    held: int


class FenceObeyed(WorldRecord, frozen=True):
    """An actor acted on a call of a controller that has been replaced: never."""

    actor: str
    got: int
    held: int


class PermitsUsed(WorldRecord, frozen=True):
    """A new peak of what the workers were given at once by one controller."""

    incarnation: int
    in_flight: int
    held_groups: int  # admitted and not yet trained, by the queue's own count
    held_bytes: int


class PoisonTaken(WorldRecord, frozen=True):
    """An engine was given a prompt that hangs there, or kills it."""

    prompt_index: int
    attempt: int
    engine: str


class EngineRetired(WorldRecord, frozen=True):
    """An engine's process was ended for good, as its controller asked."""

    engine: str


class Closed(WorldRecord, frozen=True):
    """Records that the controller which ended has closed an actor."""

    actor: str


class Ended(WorldRecord, frozen=True):
    """The episode is over; what is left."""

    outcome: str  # of the last controller
    running: int  # rollouts that workers still work on for the last controller
    unclosed: tuple[str, ...]  # actors that were alive and not closed
    telemetry_lost: int  # steps without metrics although no telemetry fault fired

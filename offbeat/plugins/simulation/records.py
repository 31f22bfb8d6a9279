"""Records that the fake actors of an episode write, in the order of events.

The controller never sees these. The auditor reads only these and the controller's journal.
"""

import msgspec

from offbeat.messages.groups import VersionSpans


class WorldRecord(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class of records. ``at`` is virtual time in seconds."""

    at: float


class Fault(WorldRecord, frozen=True):
    """A fault fired: an actor could see its effect."""

    kind: str  # a name of offbeat.plugins.simulation.faults
    target: str
    detail: str = ""


class ControllerStarted(WorldRecord, frozen=True):
    """A controller incarnation started."""

    incarnation: int


class ControllerEnd(WorldRecord, frozen=True):
    """A controller incarnation ended."""

    incarnation: int
    outcome: str  # finished | failed | aborted | killed
    error: str = ""  # one line, as shown to the operator
    cause: str = ""  # class name of the first cause


class DrawnSamples(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of a group's samples as their worker drew them, one entry per sample."""

    masked: tuple[bool, ...]
    retries: tuple[int, ...]
    turns: tuple[int, ...]
    branches: tuple[int, ...]
    media_bytes: int = 0  # of the pictures of their prompt


class Generated(WorldRecord, frozen=True):
    """A worker finished a group and sent it. It may never arrive."""

    prompt_index: int
    attempt: int
    engine: str
    incarnation: str
    spans: tuple[VersionSpans, ...]  # one entry per sample, as stamped by the engine
    samples: DrawnSamples
    poison: str = ""  # its error; empty for a correct group
    machine: str = ""  # machine that stores its payload
    spooled: bool = False  # whether a copy of the payload is in the run directory


class Scored(WorldRecord, frozen=True):
    """A worker finished a group of an evaluation: scored, never trained."""

    prompt_index: int  # in the evaluation's own source
    attempt: int
    engine: str
    incarnation: str
    spans: tuple[VersionSpans, ...]
    poison: str = ""
    eval_set: str = ""


class Evaluated(WorldRecord, frozen=True):
    """The controller recorded an evaluation as done."""

    due: int  # version that was to be scored
    version: int  # version that the controller reports
    samples: tuple[tuple[str, int], ...]  # set and prompt index of each


class EngineServes(WorldRecord, frozen=True):
    """An engine has verified weights and decodes with them from now on."""

    engine: str
    incarnation: str
    epoch: int
    version: int
    digest: str


class FetchBegan(WorldRecord, frozen=True):
    """An engine began to fetch a release from the trainer ranks that hold its buckets."""

    engine: str
    incarnation: str
    epoch: int
    version: int
    digest: str  # of the release that it was asked to load


class FetchEnded(WorldRecord, frozen=True):
    """A fetch is over, successful or not. If its engine died, it has no such record."""

    engine: str
    incarnation: str
    epoch: int
    problem: str  # why there are no weights to load, or empty
    contents: tuple[str, ...]  # releases of the buckets, each once; missing: one lacks
    resent: int  # buckets that another rank was asked for


class MachineLost(WorldRecord, frozen=True):
    """A machine died, or was cut off, with everything on it.

    Recorded when that began, and when it was noticed.
    """

    machine: str
    actors: tuple[str, ...]  # actors that ran on it


class EngineComputesOther(WorldRecord, frozen=True):
    """An engine received a release intact, but computes with other weights."""

    engine: str
    incarnation: str
    epoch: int
    version: int


class Decoded(WorldRecord, frozen=True):
    """An engine that shares the trainer's weights has decoded without a pause until now."""

    engine: str
    incarnation: str
    since: float


class WeightsChanging(WorldRecord, frozen=True):
    """A trainer began to change weights that engines share."""

    incarnation: int


class WeightsUnchanged(WorldRecord, frozen=True):
    """A trainer has left shared weights unchanged, because its step was not applied."""

    incarnation: int


class EngineDied(WorldRecord, frozen=True):
    """An engine incarnation ended."""

    engine: str
    incarnation: str


class TrainerStarted(WorldRecord, frozen=True):
    """The trainer ranks started, with the initial model."""

    incarnation: int


class TrainerRestored(WorldRecord, frozen=True):
    """The trainer ranks restored this version."""

    incarnation: int
    version: int
    digest: str


class TrainerApplied(WorldRecord, frozen=True):
    """The optimizer applied a step: the trainer's own account of what it trained."""

    incarnation: int
    step: int
    attempt: int
    version: int  # version after the step
    prompt_indices: tuple[int, ...]
    attempts: tuple[int, ...]  # attempt of each group, from its payload
    oldest: tuple[int, ...]  # oldest token version of each group, from its payload
    newest: tuple[int, ...]
    poison: tuple[str, ...]  # error of each group; empty strings for correct ones
    digest: str  # digest of the weights after the step
    masked: tuple[tuple[int, ...], ...] = ()  # masked samples of each group, from its payload
    advantages: tuple[tuple[float, ...], ...] = ()  # advantages of each group, as they were sent
    # Rows of each sample of each group, from its payload
    branches: tuple[tuple[int, ...], ...] = ()
    media_bytes: tuple[int, ...] = ()  # of the pictures of each group, from its payload
    minibatches: tuple[int, ...] = ()  # minibatch of each group, as it was sent; empty: one
    epochs: int = 1  # times that each group was trained


class StepReported(WorldRecord, frozen=True):
    """The controller emitted the metrics of a step."""

    step: int
    version: int  # version after the step; below its number, the step was not applied
    masked_fraction: float
    retried_fraction: float
    branches_mean: float
    branched_fraction: float


class ReleasePublished(WorldRecord, frozen=True):
    """The trainer published a release of its weights."""

    incarnation: int
    version: int
    digest: str


class CheckpointWritten(WorldRecord, frozen=True):
    """A checkpoint is complete on disk and durable."""

    version: int
    digest: str


class CheckpointLatest(WorldRecord, frozen=True):
    """LATEST, or the checkpoint it names, has changed."""

    version: int
    verifies: bool


class FenceRefused(WorldRecord, frozen=True):
    """An actor refused a call of an older controller."""

    actor: str
    got: int
    highest: int


class FenceObeyed(WorldRecord, frozen=True):
    """An actor wrongly executed a call of a replaced controller."""

    actor: str
    got: int
    highest: int


class PermitsUsed(WorldRecord, frozen=True):
    """A new peak of the groups that one controller has given to the workers."""

    incarnation: int
    in_flight: int
    held_groups: int  # groups admitted and not yet trained, by the queue's own count
    held_bytes: int


class PoisonTaken(WorldRecord, frozen=True):
    """An engine received a prompt that hangs or kills it."""

    prompt_index: int
    attempt: int
    engine: str


class RewardsCalled(WorldRecord, frozen=True):
    """A worker has called the reward functions of a group."""

    process: str
    calls: int  # of the process since it started
    evaluation: bool


class WorkerStarted(WorldRecord, frozen=True):
    """A process of an environment worker started."""

    worker: str
    process: str


class WorkerDied(WorldRecord, frozen=True):
    """A process of an environment worker ended."""

    worker: str
    process: str


class EngineRetired(WorldRecord, frozen=True):
    """A controller ended an engine's process for good."""

    engine: str


class Closed(WorldRecord, frozen=True):
    """An ended controller has closed an actor."""

    actor: str


class Ended(WorldRecord, frozen=True):
    """End of the episode, with everything that is left."""

    outcome: str  # outcome of the last controller
    running: int  # rollouts that workers still run for the last controller
    unclosed: tuple[str, ...]  # live actors that were not closed
    telemetry_lost: int  # steps without metrics although no telemetry fault fired
    evaluations_failed: int = 0  # given up by the last controller, with a message

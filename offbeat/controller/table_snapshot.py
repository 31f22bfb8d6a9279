"""Records of which a group table consists, as a snapshot of the journal encodes them."""

import msgspec

from offbeat.controller.events import ReturnKind, StepIntent
from offbeat.controller.group_moves import Place
from offbeat.messages.groups import Receipt
from offbeat.telemetry.applied_steps import AppliedStepHistory


class GroupRecord(msgspec.Struct, gc=False):
    """State of one prompt group between its admission and its end.

    It is exempt from garbage collection: after a long rewind there are millions, and the collector
    would stop the event loop to traverse them.
    """

    prompt_index: int
    target_step: int | None  # None: any step may train it
    place: Place = Place.ADMITTED
    attempt: int = 0  # of the last dispatch
    engine: str = ""
    oldest_version: int = -1  # no token is older; -1 while admitted
    receipt: Receipt | None = None
    tokens: int = 0  # of the receipt
    arrival: int = 0  # number of earlier commits
    returns: dict[ReturnKind, int] = {}  # msgspec copies it for each instance


class Totals(msgspec.Struct):
    """Counts over the whole run; groups undone by a rewind do not count as trained."""

    drawn: int = 0
    trained: int = 0
    evicted: int = 0
    failed_prompts: int = 0  # prompts dropped for failures of their data, not by a filter
    arrivals: int = 0
    retried: dict[str, int] = {}  # by reason
    dropped: dict[str, int] = {}  # by reason
    failed_prompts_infrastructure: int = 0  # prompts dropped for failures of the infrastructure
    cancelled: int = 0  # rollouts stopped in flight; they are in ``retried`` or ``dropped``, too
    steps_refused: int = 0  # batches that the trainer did not apply, which made no version


class TableSnapshot(msgspec.Struct, frozen=True):
    """Content of a group table at one moment, from which a fold continues.

    Its size depends on the outstanding groups and not on the number of steps: the groups of trained
    steps are in the journal's segments only.
    """

    run_id: str
    incarnation: int
    lineage: int
    trainer_version: int
    digest: str | None
    intent: StepIntent | None
    checkpoints: list[int]
    batch_deficits: dict[int, int]
    totals: Totals
    steps: AppliedStepHistory
    groups: list[GroupRecord]  # training, ready, in flight, each in its order; then the others
    checkpoint_digests: dict[int, str] = {}
    rewinding_to: int | None = None
    initial_weights: str = ""

"""The auditor's first pass: indexes the actors' own records.

It reads no data of the controller, so each violation follows only from the actors' records:
weights that were never published, a step that was trained twice, a checkpoint that does not verify.

Defines violations of invariants, and the places where they were found.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from offbeat.config.limits import max_outstanding_groups
from offbeat.config.run import RunConfig
from offbeat.messages.groups import VersionSpans
from offbeat.plugins.simulation import records
from offbeat.plugins.simulation.faults import KINDS

MOST_FINDINGS: Final = 10
"""Maximum number of violations kept per invariant. Later ones follow from the first."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant. ``invariant`` is its short name, ``I1`` to ``I25``."""

    invariant: str
    message: str  # includes the values that contradict each other
    where: str  # index and class of the event or record, as in ``journal 17 Claimed``

    def __str__(self) -> str:
        return f"{self.invariant} broken at {self.where}: {self.message}"


class Findings:
    """Collects violations. The auditor continues after each. The first one shows the cause."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._counts: dict[str, int] = {}  # number by invariant
        self.source = ""  # journal | records
        self.index = 0
        self.current: object = None  # event or record being checked

    def add(self, invariant: str, message: str) -> None:
        """Report a violation by the current event or record."""
        count = self._counts[invariant] = self._counts.get(invariant, 0) + 1
        if count <= MOST_FINDINGS:
            where = f"{self.source} {self.index} {type(self.current).__name__}"
            self.violations.append(Violation(invariant, message, where))


class AuditTable:
    """Part of the auditor that reads some classes of events and records, each in order.

    A method named ``on_...`` reads the class that its parameter is annotated with.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings, self._add = findings, findings.add

    def list_readers(self) -> Iterator[tuple[type[Any], Callable[[Any], None]]]:
        """Yield each class that the table reads, and the method."""
        for name in dir(self):
            if name.startswith("on_"):
                method = getattr(self, name)
                yield next(iter(method.__annotations__.values())), method


_MIB = 2**20
HARMLESS_TO_TRAINER: Final = frozenset(
    name for name, kind in KINDS.items() if kind.profile in ("engines", "data", "machines")
)
"""Faults of other actors. The record of a fault tells whether a machine killed the trainer too."""

Trained = tuple[tuple[int, int], ...]
"""Step and attempt of each version in the trainer's weights, oldest first."""


class SentGroup(NamedTuple):
    """A group as its worker sent it."""

    spans: tuple[VersionSpans, ...]
    digests: dict[int, str]  # digest of the served weights by version
    samples: records.DrawnSamples


class AuditedStep(NamedTuple):
    """One optimizer step according to the trainer."""

    record_index: int
    record: records.TrainerApplied
    before: Trained
    # Digests of versions 0, 1, ... before the step; None: never reported
    digests: tuple[str | None, ...]


class World(AuditTable):
    """History of the run according to the actors' own records."""

    def __init__(self, config: RunConfig, findings: Findings) -> None:
        super().__init__(findings)
        self._config = config
        self.ended: records.Ended | None = None
        self.controller_ends: list[records.ControllerEnd] = []
        self.last_fault_at: float | None = None
        self.faults = Counter[str]()  # that fired, by kind
        self.answers: dict[tuple[int, int, str, str], list[SentGroup]] = {}
        self.reported: list[records.StepReported] = []
        self.serves: set[tuple[str, str, int, int, str]] = set()
        # (engine, incarnation, epoch) of loads with wrong results
        self.computes_other: set[tuple[str, str, int]] = set()
        # Epoch by engine, incarnation and version
        self._other: dict[tuple[str, str, int], int] = {}
        # Lineage of the newest release, by version and digest
        self.published: dict[tuple[int, str], int] = {}
        self.written: set[tuple[int, str]] = set()
        self.restored: set[int] = {0}
        self.steps: dict[tuple[int, int], AuditedStep] = {}
        # Attempts that hit a poison prompt, by prompt index
        self.poisoned: dict[int, set[int]] = {}
        self.retired: set[str] = set()  # engines retired for good
        # (prompt index, attempt) without a copy on disk
        self.lost_payloads: set[tuple[int, int]] = set()
        # Such payloads by machine
        self._only_on: dict[str, set[tuple[int, int]]] = {}
        self._trainer_was_struck = False  # by a fault that may kill it
        # Digest by version, by engine and incarnation
        self._served: dict[tuple[str, str], dict[int, str]] = {}
        self._newest: dict[tuple[str, str], tuple[int, int]] = {}  # newest version and its lineage
        self._closed = False  # whether the controller of this incarnation closed the trainer
        self._gone = False  # whether the trainer has lost its state since then
        self._lineage = 0  # number of restores of the trainer
        self._stack: list[tuple[int, int]] = []  # steps in the trainer's weights
        self._trained: list[frozenset[int]] = []  # prompt indices of each of them
        self._in_weights: set[int] = set()  # union of these prompt indices
        self._digests: list[str | None] = [None]  # digests of versions 0, 1, ...
        self._known: dict[int, set[str]] = {}  # all digests that the trainer had for a version
        self._saved: dict[tuple[int, str], tuple[Trained, list[frozenset[int]], list[Any]]] = {}

    @property
    def steps_in_weights(self) -> Trained:
        """Steps that the trainer's weights contain now."""
        return tuple(self._stack)

    def on_fault(self, record: records.Fault) -> None:
        self.last_fault_at = record.at
        self.faults[record.kind] += 1
        self._trainer_was_struck |= record.kind not in HARMLESS_TO_TRAINER

    def on_machine_lost(self, record: records.MachineLost) -> None:
        self.lost_payloads |= self._only_on.pop(record.machine, set())
        self._trainer_was_struck |= "trainer" in record.actors

    def on_controller_ended(self, record: records.ControllerEnd) -> None:
        self.controller_ends.append(record)

    def on_reported(self, record: records.StepReported) -> None:
        self.reported.append(record)

    def on_poison_taken(self, record: records.PoisonTaken) -> None:
        self.poisoned.setdefault(record.prompt_index, set()).add(record.attempt)

    def on_engine_retired(self, record: records.EngineRetired) -> None:
        self.retired.add(record.engine)

    def on_ended(self, record: records.Ended) -> None:
        self.ended = record

    # --- engines ---------------------------------------------------------------------------------

    def on_computes_other(self, record: records.EngineComputesOther) -> None:
        process = record.engine, record.incarnation
        self.computes_other.add((*process, record.epoch))
        self._other[*process, record.version] = record.epoch

    def on_served(self, record: records.EngineServes) -> None:
        process = record.engine, record.incarnation
        if self._other.get((*process, record.version), record.epoch) != record.epoch:
            del self._other[*process, record.version]  # another transfer of it was correct
        lineage = self.published.get((record.version, record.digest))
        if lineage is None:
            self._add(
                "I6",
                f"{record.engine} serves version {record.version} with digest {record.digest}, "
                "which the trainer never published",
            )
        version, of_lineage = self._newest.get(process, (-1, 0))
        if record.version < version and lineage == of_lineage:
            self._add("I5", f"{record.engine} went from version {version} back to {record.version}")
        self._newest[process] = record.version, lineage or 0
        self._served.setdefault(process, {})[record.version] = record.digest
        self.serves.add((*process, record.epoch, record.version, record.digest))

    def on_generated(self, record: records.Generated) -> None:
        served = self._served.get((record.engine, record.incarnation), {})
        digests = {version: served.get(version, "") for version in set(list_versions(record.spans))}
        if not record.poison and "" in digests.values():
            self._add(
                "I6",
                f"group {record.prompt_index} has tokens of versions {sorted(digests)}; "
                f"{record.engine} incarnation {record.incarnation} had served {sorted(served)}",
            )
        if not record.spooled:
            packed = self._only_on.setdefault(record.machine, set())
            packed.add((record.prompt_index, record.attempt))
        wrong = [v for v in digests if (record.engine, record.incarnation, v) in self._other]
        if wrong:
            self._add(
                "I6",
                f"group {record.prompt_index} has tokens of versions {wrong}, of which {record.engine} "
                f"incarnation {record.incarnation} computes other weights than it took",
            )
        key = record.prompt_index, record.attempt, record.engine, record.incarnation
        self.answers.setdefault(key, []).append(SentGroup(record.spans, digests, record.samples))

    # --- trainer ---------------------------------------------------------------------------------

    def _learn(self, version: int, digest: str) -> None:
        """Record the digest of the trainer's present weights."""
        self._digests[version] = digest
        self._known.setdefault(version, set()).add(digest)

    def on_trainer_started(self, record: records.TrainerStarted) -> None:
        """Handle a lost trainer: its weights are gone.

        After the end of the run this affects only the next controller.
        """
        self._gone = True
        if record.incarnation > 1 and not (self._trainer_was_struck or self._closed):
            self._add("I17", "the trainer was replaced although no fault had struck it")
        if not self._closed:
            self._begin_empty()

    def _begin_empty(self) -> None:
        self._gone = False
        self._lineage += 1
        self._hold((), [], self._digests[:1])

    def on_closed(self, record: records.Closed) -> None:
        self._closed = self._closed or record.actor == "trainer"

    def on_controller_started(self, record: records.ControllerStarted) -> None:
        del record
        self._closed = False
        if self._gone:
            self._begin_empty()

    def _hold(
        self, stack: Trained, trained: list[frozenset[int]], digests: list[str | None]
    ) -> None:
        """Set the trainer's state to that of another moment."""
        self._stack, self._trained, self._digests = list(stack), trained[:], digests[:]
        self._in_weights = set[int]().union(*trained)

    def on_trainer_restored(self, record: records.TrainerRestored) -> None:
        self._lineage += 1
        self.restored.add(record.version)
        saved = self._saved.get((record.version, record.digest))
        if record.version == 0:
            self._hold((), [], self._digests[:1])
            self._check_digest(0, record.digest)
        elif saved is None:
            self._add(
                "I12",
                f"the trainer was restored to version {record.version} with digest "
                f"{record.digest}, of which no checkpoint was written",
            )
        else:
            self._hold(*saved)

    def on_applied(self, record: records.TrainerApplied) -> None:
        key = record.step, record.attempt
        if record.version != len(self._stack) + 1:
            self._add("I5", f"the trainer made version {record.version} out of {len(self._stack)}")
        if key in self.steps:
            self._add("I7", f"step {record.step} attempt {record.attempt} was applied twice")
        prompt_indices = frozenset(record.prompt_indices)
        again = self._in_weights & prompt_indices
        if again or len(prompt_indices) < len(record.prompt_indices):
            self._add(
                "I2",
                f"step {record.step} trains {sorted(again) or record.prompt_indices} once more",
            )
        self._check_content(record)
        moment = AuditedStep(
            self._findings.index, record, self.steps_in_weights, tuple(self._digests)
        )
        self.steps[key] = moment
        self._stack.append(key)
        self._trained.append(prompt_indices)
        self._in_weights |= prompt_indices
        self._digests.append(None)
        self._learn(len(self._stack), record.digest)

    def _check_content(self, record: records.TrainerApplied) -> None:
        """Check the groups' content against their payloads."""
        before, bound = record.version - 1, self._config.sampler.max_staleness
        for prompt_index, poison in zip(record.prompt_indices, record.poison, strict=False):
            if poison:
                self._add("I11", f"group {prompt_index} was trained although it is: {poison}")
        if record.oldest and before - min(record.oldest) > bound:
            self._add(
                "I4",
                f"step {record.step} trained tokens of version {min(record.oldest)} at version "
                f"{before}; max_staleness is {bound}",
            )
        if record.newest and max(record.newest) > before:
            self._add(
                "I4",
                f"step {record.step} trained tokens of version {max(record.newest)}, which was not "
                f"made before version {before}",
            )

    def on_published(self, record: records.ReleasePublished) -> None:
        version = len(self._stack)
        if record.version != version:
            self._add(
                "I6", f"version {record.version} was published while the trainer held {version}"
            )
        else:
            self._check_digest(version, record.digest)
        self.published[record.version, record.digest] = self._lineage

    def _check_digest(self, version: int, digest: str) -> None:
        known = self._digests[version]
        if known is not None and known != digest:
            self._add(
                "I6", f"version {version} has digest {digest}; the trainer's weights have {known}"
            )
        self._learn(version, digest)

    def on_checkpoint_written(self, record: records.CheckpointWritten) -> None:
        key = record.version, record.digest
        digest_now = self._digests[record.version] if record.version < len(self._digests) else None
        if record.digest not in self._known.get(record.version, ()):
            self._add(
                "I12",
                f"a checkpoint of version {record.version} with digest {record.digest} was "
                "written; the trainer never had such weights",
            )
        self.written.add(key)
        if digest_now == record.digest:
            self._saved[key] = (
                tuple(self._stack[: record.version]),
                self._trained[: record.version],
                self._digests[: record.version + 1],
            )

    # --- disk, fences, permits -------------------------------------------------------------------

    def on_checkpoint_latest(self, record: records.CheckpointLatest) -> None:
        if not record.verifies:
            self._add("I12", f"LATEST names version {record.version}, which does not verify")

    def on_fence_obeyed(self, record: records.FenceObeyed) -> None:
        self._add(
            "I13", f"{record.actor} obeyed incarnation {record.got}; it had seen {record.highest}"
        )

    def on_permits_used(self, record: records.PermitsUsed) -> None:
        config, reach = self._config, max_outstanding_groups(self._config)
        in_flight = config.rollout.max_in_flight or reach
        limits = (
            # A cancelled call counts until its task has ended; the journal is exact.
            ("groups in flight", record.in_flight, 2 * in_flight),
            # A trained group is released once the journal has recorded it; the next ones may arrive
            # before.
            (
                "groups held",
                record.held_groups - config.groups_per_step,
                config.buffer.capacity_groups or reach,
            ),
            ("bytes held", record.held_bytes, int(config.buffer.capacity_mib * _MIB)),
        )
        for what, used, limit in limits:
            if used > limit:
                self._add("I8", f"{used} {what} at once; at most {limit} are allowed")


def list_versions(spans: Iterable[VersionSpans]) -> list[int]:
    """Return the version of each span of each sample."""
    return [version for sample in spans for version, _ in sample]

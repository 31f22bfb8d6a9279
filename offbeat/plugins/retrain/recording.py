"""Reads the applied steps of a run: their groups, in the recorded order, and their results.

The journal says which groups each step trained, in which chunks, and which steps were rewound. The
spool has the columns of the groups, ``metrics.jsonl`` the results. Loads no torch.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offbeat.controller.events import (
    AnyEvent,
    Checkpointed,
    Claimed,
    Committed,
    Joined,
    Released,
    Rewound,
    StepApplied,
)
from offbeat.messages.failures import Component
from offbeat.messages.groups import Receipt, group_id
from offbeat.plugins.retrain.errors import CannotRetrain, RecordDamaged
from offbeat.runs.metrics_file import ValidRecords, decode_record, whole_lines
from offbeat.runs.page_files import METRICS
from offbeat.runs.past_run import read_events
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.spool import FOLDER, NotInSpool, read

KEY: Final = "transfer_queue.spool=keep"
"""Setting with which a run records the columns of all groups."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One applied step that no rewind has undone."""

    step: int
    version: int  # of the trainer after the step
    chunks: tuple[tuple[Receipt, ...], ...]  # in the order in which the trainer received them

    @property
    def receipts(self) -> Iterator[Receipt]:
        for chunk in self.chunks:
            yield from chunk


@dataclass(slots=True)
class RecordedSteps:
    """Applied steps of a journal, and the digests of their weights. Fold of its events."""

    after: int  # earlier versions are not kept
    last: float  # nor are later ones
    steps: dict[int, RecordedStep] = field(default_factory=dict[int, RecordedStep])
    """Applied steps by version."""
    checkpoints: dict[int, str] = field(default_factory=dict[int, str])
    """Digest of the weights in the checkpoint of each version."""
    releases: dict[int, str] = field(default_factory=dict[int, str])
    """Digest of the released weights of each version."""
    initial_weights: str = ""  # digest; empty: unknown
    newest: int = 0  # version of the trainer
    _ready: dict[int, Receipt] = field(default_factory=dict[int, Receipt])
    _chunks: list[tuple[Receipt, ...]] = field(default_factory=list[tuple[Receipt, ...]])
    _attempt: int = 0  # that claimed them

    def apply(self, event: AnyEvent) -> None:
        """Add the next event of the journal."""
        match event:
            case Committed():
                self._ready[event.receipt.prompt_index] = event.receipt
            case Claimed():
                if event.attempt != self._attempt:
                    self._attempt, self._chunks = event.attempt, []
                self._chunks.append(tuple(self._ready[each] for each in event.prompt_indices))
            case StepApplied():
                self._applied(event)
            case Rewound():
                self._rewind_to(event.to_version)
            case Checkpointed():
                self.checkpoints[event.version] = event.digest
            case Released():
                self.releases[event.version] = event.digest
            case Joined(component=Component.TRAINER) if event.initial_weights:
                self.initial_weights = event.initial_weights
            case _:
                pass

    def _applied(self, event: StepApplied) -> None:
        self.newest = event.version
        if self.after < event.version <= self.last:
            step = RecordedStep(event.step, event.version, tuple(self._chunks))
            if {each.prompt_index for each in step.receipts} != set(event.prompt_indices):
                raise AssertionError(f"step {event.step} trained different groups than it claimed")
            self.steps[event.version] = step
        for prompt_index in event.prompt_indices:
            self._ready.pop(prompt_index, None)

    def _rewind_to(self, version: int) -> None:
        """Forget the steps that the run has undone. Their groups are rolled out again."""
        self.newest = version
        for of_version in (self.steps, self.checkpoints, self.releases):
            for undone in [each for each in of_version if each > version]:
                del of_version[undone]


def read_steps(run_dir: Path, after: int, last: float) -> RecordedSteps:
    """Read the applied steps of a run with versions from ``after + 1`` to ``last``.

    Raises:
        NotARun: The directory contains no journal.
        JournalCorrupt: A file of the journal is damaged.
        JournalVersion: A different version of offbeat wrote it.
    """
    return fold_steps(read_events(run_dir), after, last)


def fold_steps(events: Iterable[AnyEvent], after: int, last: float) -> RecordedSteps:
    """Return the applied steps of these events."""
    recorded = RecordedSteps(after, last)
    for event in events:
        recorded.apply(event)
    return recorded


def read_rows(run_dir: Path, versions: Iterable[int]) -> dict[int, Mapping[str, float]]:
    """Return the recorded metrics of these versions, without steps that a rewind has undone.

    Raises:
        OSError: The file cannot be read.
    """
    path, valid, wanted = run_dir / METRICS, ValidRecords(), frozenset(versions)
    rows = dict[int, Mapping[str, float]]()
    if not path.is_file():
        return rows
    for place, line in whole_lines(path):
        record = decode_record(line)
        if record is not None:
            valid.take(record, place)
            if valid.steps.get(record.version) == place and record.version in wanted:
                rows[record.version] = record.metrics
    return rows


class RecordedColumns:
    """The columns of recorded groups, in the spool of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._spool = run_dir, run_dir / FOLDER

    def check(self, steps: Iterable[RecordedStep]) -> None:
        """Check that the run has recorded the groups of these steps, without reading them.

        Raises:
            CannotRetrain: It has not. Names the first step and group.
        """
        there = {path.name for path in self._spool.glob("*")}
        for step in steps:
            for receipt in step.receipts:
                place = receipt.spooled
                if place is None or place.segment not in there:
                    group = group_id(receipt.prompt_index)
                    problem = f"step {step.step}: the tokens of {group} are not recorded"
                    fix = (
                        f"Train with {KEY}, or resume with it and retrain the steps after that "
                        "(all processes need to see the run directory)"
                    )
                    raise CannotRetrain(str(self._run_dir), problem, fix)

    def read(self, step: int, receipt: Receipt) -> Columns:
        """Return the columns of a group, byte for byte as the trainer received them.

        Raises:
            RecordDamaged: They are damaged or changed.
        """
        assert receipt.spooled is not None  # noqa: S101 -- ``check`` refuses such a run
        try:
            return read(self._spool, receipt.spooled)
        except NotInSpool as damage:
            group = f"step {step}: recorded samples of {group_id(receipt.prompt_index)}"
            raise RecordDamaged(group, str(damage), "Restore the spool of the run") from damage

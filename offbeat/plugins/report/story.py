"""Reads a run directory once for the page: its journal and the files next to it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from offbeat.controller.events import AnyEvent, Committed
from offbeat.controller.run_stats import summarize
from offbeat.messages.bad_json import decode_json
from offbeat.messages.groups import Receipt
from offbeat.plugins.report.group_rows import GroupColumns, GroupRows
from offbeat.plugins.report.same_prompt import find_same_prompts
from offbeat.plugins.report.timeline import Timeline
from offbeat.plugins.report.verdicts import State
from offbeat.run_files.files import FAILURES, FAILURES_BYTES
from offbeat.run_files.limits import (
    STATUS_BYTES,
    SUMMARY_BYTES,
    UNREADABLE,
    DamagedFile,
    read_json,
    read_limited,
)
from offbeat.runs.applied_steps import AppliedSteps, join_columns, read_evaluations
from offbeat.runs.directory import CONFIG, SUMMARY
from offbeat.runs.logged_samples import LoggedGroups, TokenText, read_logged_rows, token_text
from offbeat.runs.metrics_file import MetricsFile, read_metrics_file
from offbeat.runs.page_files import METRICS, recipe_values
from offbeat.runs.run_journal import JournalState, RunJournal
from offbeat.runs.why import GroupHistories, GroupHistory
from offbeat.telemetry.status_file import STATUS_FILE, StatusRecord
from offbeat.telemetry.summary import Summary

T = TypeVar("T")
RECORDS: Final = 400_000
"""Number of events above which only stretches of a journal are read. A group has three or four."""


class RunStory:
    """All facts of the page about one run."""

    def __init__(
        self, run_dir: Path, example_groups: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Read the directory. ``example_groups`` groups have text and history.

        Raises:
            NotARun: The directory has no journal.
            JournalCorrupt: A file of the journal is damaged.
            JournalVersion: A different version of offbeat wrote it.
            NoRegularFile: A name in the journal does not belong to a regular file.
            ImpossibleEvent: An event does not fit the events before it.
        """
        self.run_dir, self._clock = run_dir, clock
        self.problems = list[str]()
        """Files that could not be read, one sentence each."""
        self.config = self._read_config()
        journal = RunJournal(run_dir)
        self.problems += journal.problems
        self.ledger, self._totals = journal.ledger, journal.totals
        self.began_unix_s = journal.began_unix_s
        self.timeline, self.steps = Timeline(journal.aggregates), AppliedSteps(journal.aggregates)
        self.status: StatusRecord | None = None
        """Status of a live run; None for any other run."""
        self.state: State
        self.state, self.summary = self._ended()
        metrics = read_metrics_file(run_dir / METRICS)
        self._note(metrics)
        own = self.steps.columns()
        self.columns, self.evaluations = join_columns(own, metrics), read_evaluations(own, metrics)
        self._read_groups(journal, example_groups)
        self.same_prompts = find_same_prompts(run_dir, self.text) if example_groups else None
        self.failed_samples = self._read_failures() if example_groups else None

    @property
    def name(self) -> str:
        """Return the recipe's name."""
        return str(self.config.get("name", self.run_dir.name))

    @property
    def bound(self) -> int | None:
        """Return ``sampler.max_staleness``, or None if the config lacks it."""
        bound = self.config.get("sampler.max_staleness")
        return bound if isinstance(bound, int) else None

    # --- reading ---------------------------------------------------------------------------------

    def _read_config(self) -> dict[str, object]:
        """Return the values of ``config.yaml`` by dotted key."""
        try:
            return recipe_values(self.run_dir / CONFIG)
        except (*UNREADABLE, yaml.YAMLError, UnicodeDecodeError) as error:
            self.problems.append(f"{CONFIG} cannot be read: {error}")
            return {}

    def _ended(self) -> tuple[State, Summary]:
        """Return how the run ended, from its summary if the last controller wrote it."""
        written = self._decoded(SUMMARY, SUMMARY_BYTES, Summary)
        if written is not None:
            there, counted = self.ledger.trainer_version, written.trainer_version
            if counted > there:
                self.problems.append(
                    f"the journal ends at step {there}, and {SUMMARY} counts {counted}: "
                    "a part of the journal is missing, so curves and groups end before the run did"
                )
            if written.controller_incarnations >= self.ledger.incarnation:
                return written.outcome, written
        self.status = self._read_status()
        steps = self.config.get("steps")
        state: State = "unfinished" if self.status is None else "running"
        return state, summarize(
            self.ledger,
            self._totals,
            run_id=self.ledger.run_id,
            name=self.name,
            steps_asked=steps if isinstance(steps, int) else 0,
            outcome="aborted",
            error=None,
        )

    def _read_status(self) -> StatusRecord | None:
        """Return the present status, or None without a sign that the run is alive."""
        record = self._decoded(STATUS_FILE, STATUS_BYTES, StatusRecord)
        if record is None:
            return None
        is_own = record.run_id == self.ledger.run_id
        return record if is_own and record.is_fresh(self._clock()) else None

    def _decoded(self, name: str, limit: int, kind: type[T]) -> T | None:
        """Decode a JSON file of the run; return None if it is missing or unreadable."""
        try:
            return read_json(self.run_dir / name, limit, kind)
        except FileNotFoundError:
            pass
        except DamagedFile as error:
            self.problems.append(f"{name} cannot be read: {error.problem}")
        except UNREADABLE as error:
            self.problems.append(f"{name} cannot be read: {error}")
        return None

    def _read_failures(self) -> dict[str, Any] | None:
        try:
            return find_failed_samples(self.run_dir)
        except UNREADABLE as error:
            self.problems.append(f"{FAILURES} cannot be read: {error}")
            return None

    def _note(self, metrics: MetricsFile) -> None:
        if metrics.problem:
            self.problems.append(f"{METRICS} cannot be read: {metrics.problem}")
        if metrics.unreadable:
            self.problems.append(f"{METRICS} has {metrics.unreadable} lines that are not records")
        if metrics.sampled:
            self.problems.append(f"{METRICS} is long: only some of its steps were read")

    def _read_groups(self, journal: RunJournal, example_groups: int) -> None:
        """Read the groups of some stretches of the journal, or of all of a short one."""
        self.examples, self.receipts = list[int](), dict[int, Receipt]()
        self.histories = dict[int, GroupHistory]()
        columns, labels = list[GroupColumns](), list[str]()
        stretches = journal.stretches(RECORDS) if example_groups else []
        for stretch in stretches:
            begun = journal.state_before(stretch.start)
            if begun is None:
                continue  # its snapshot is damaged, so other groups are shown
            ledger = begun.ledger
            rows = GroupRows(ledger.totals.drawn, labels)
            events = list[tuple[int, AnyEvent]]()
            for number, event in journal.events(stretch, ledger):
                rows.take(event)
                events.append((number, event))
            is_last = stretch.stop == len(journal.aggregates)
            ended_by = None if is_last else journal.undone_to(stretch.stop - 1)
            columns.append(rows.columns(ended_by=ended_by))
            examples = columns[-1].examples(max(1, example_groups // len(stretches)))
            self._read_examples(events, examples, journal.state_before(stretch.start) or begun)
        self.groups = GroupColumns.of(columns, labels)
        self._read_texts()

    def _read_examples(
        self, events: Sequence[tuple[int, AnyEvent]], groups: list[int], begun: JournalState
    ) -> None:
        histories, wanted = GroupHistories(groups, begun.ledger, begun.driver), set(groups)
        for number, event in events:
            begun.ledger.apply(event)
            histories.take(number, event)
            if isinstance(event, Committed) and event.receipt.prompt_index in wanted:
                self.receipts[event.receipt.prompt_index] = event.receipt
        self.histories |= {each: histories.of(each) for each in groups}
        self.examples += groups

    def _read_texts(self) -> None:
        self.rows: LoggedGroups
        self.rows, skipped = read_logged_rows(self.run_dir, self.examples)
        if skipped:
            self.problems.append(
                f"{skipped} files of rollouts/ were left out: damaged, or too large together"
            )
        model = self.config.get("model.path")
        self.text: TokenText = token_text(self.run_dir, str(model or ""))


_SHOWN: Final = 20
_CHARACTERS: Final = 2000  # of each text


class FailedSample(msgspec.Struct, frozen=True):
    """A line of the file. Files of other versions may lack fields."""

    group: str = ""
    attempt: int = 0
    sample: int | None = None
    reason: str = ""
    detail: str = ""
    evaluation: bool = False
    row: str = ""
    response: str = ""
    traceback: str = ""


def find_failed_samples(run_dir: Path) -> dict[str, Any] | None:
    """Return the number of failures and the first ones with their texts, or None if none is kept.

    Raises:
        OSError: The file cannot be read.
        FileTooLarge: It is larger than any file that a run writes.
        NoRegularFile: It is a pipe, a socket, a device or a directory.
    """
    if not (run_dir / FAILURES).is_file():
        return None
    found, count = list[FailedSample](), 0
    for line in read_limited(run_dir / FAILURES, 2 * FAILURES_BYTES).splitlines():
        count += 1
        if len(found) < _SHOWN:
            try:
                found.append(decode_json(line, FailedSample))
            except msgspec.DecodeError:
                continue  # torn by a crash
    return {"count": count, "file": FAILURES, "samples": [_cut(each) for each in found]}


def _cut(failed: FailedSample) -> dict[str, Any]:
    fields = msgspec.structs.asdict(failed)
    return {
        name: value[-_CHARACTERS:]
        if name == "traceback"
        else value[:_CHARACTERS]
        if isinstance(value, str)
        else value
        for name, value in fields.items()
    }

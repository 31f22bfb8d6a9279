"""``offbeat why``: the history of one prompt group."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Checkpointed,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    DropReason,
    Joined,
    Opened,
    Returned,
    Rewound,
    StepApplied,
    StepIntent,
    StepRefused,
    Unclaimed,
    WorkerLost,
)
from offbeat.controller.group_moves import Place
from offbeat.controller.group_table import GroupRecord
from offbeat.controller.ledger import Ledger
from offbeat.environments.media_prompts import find_media
from offbeat.messages.failures import WORKER_LOST, Component, OffbeatError, ShortInNotebooks
from offbeat.messages.groups import Receipt, SampleFailure, group_id
from offbeat.messages.media import MEDIA_PREFIX
from offbeat.messages.text import wrap_line
from offbeat.run_files.files import FAILURES, count_failures
from offbeat.runs.past_run import clock_time
from offbeat.runs.run_journal import JournalState, RunJournal

_GROUP: Final = re.compile(r"(?:g-)?(\d{1,18})")
_SHOWN: Final = 16  # samples with individually printed rewards


class NoSuchGroup(ShortInNotebooks, OffbeatError):
    """The journal has no such group.

    Fix: use one of the named groups.
    """

    group: str
    drawn: int
    reason: Literal["name", "range"]

    def __str__(self) -> str:
        if self.reason == "name":
            return f"{self.group!r} names no group. Write it as g-000412 or 412"
        if not self.drawn:
            return f"{self.group} was not drawn: no group was drawn yet"
        last = group_id(self.drawn - 1)
        return f"{self.group} was not drawn yet; those drawn are {group_id(0)} to {last}"


class GroupEvent(msgspec.Struct, frozen=True):
    """Something that happened to a group."""

    event: int  # number in the journal, from 1
    unix_s: float  # 0: not in the journal
    version: int  # the trainer's, before the event
    what: str
    detail: str


class GroupHistory(msgspec.Struct, frozen=True, kw_only=True):
    """A group's history, up to the end of the journal."""

    run_id: str
    group: str
    moments: list[GroupEvent]
    now: str
    until_unix_s: float  # time of the last event of the journal
    pictures: list[Any] = []  # media of its prompt, by attempt; empty: none, or not logged
    failures: int = 0  # its records in ``failures.jsonl``

    def __repr__(self) -> str:
        return self.to_text()

    def to_json(self) -> str:
        """Encode as indented JSON with a final newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    def to_text(self) -> str:
        """Format the history in 80 columns, with a final newline. A notebook shows it.

        Times are times of day. A line with the date comes before the first moment of each day.
        """
        what = max(len(moment.what) for moment in self.moments)
        number = max(len("event"), *(len(str(moment.event)) for moment in self.moments))
        moments = [(m, *clock_time(m.unix_s).rstrip("Z").rpartition("T")) for m in self.moments]
        time = max(len("time"), *(len(of_day) for *_, of_day in moments))
        lines = [f"{'event':>{number}}  {'version':>7}  {'time':<{time}}  what"]
        last_date = ""
        for m, date, _, of_day in moments:
            if date != last_date:
                lines.append(f"{'':{number}}  {'':7}  {date}")
                last_date = date
            first = f"{m.event:>{number}}  {m.version:>7}  {of_day:<{time}}  "
            lines += wrap_line(f"{m.what:<{what}}  {m.detail}", first, " " * (len(first) + 2))
        kept = [str(each) for each in self.pictures]
        if self.failures:
            kept.append(
                f"{FAILURES} has {self.failures} of its failures: row, response and traceback"
            )
        head = f"{self.group} of {self.run_id}; its journal goes to {clock_time(self.until_unix_s)}"
        rest = [line for each in (*kept, f"now: {self.now}") for line in wrap_line(each, "", "  ")]
        return "\n".join([*wrap_line(head, "", "  "), *map(str.rstrip, lines), *rest]) + "\n"


def why(run_dir: Path, group: str) -> GroupHistory:
    """Return the history of a group, named as ``g-000412`` or ``412``.

    Raises:
        NoSuchGroup: No group of this index was admitted, or the name is invalid.
        NotARun: The journal is missing.
        JournalCorrupt: A file of the journal is damaged.
        ImpossibleEvent: An event does not fit the earlier events.
    """
    named = _GROUP.fullmatch(group.strip())
    if named is None:
        raise NoSuchGroup(group, 0, "name")
    prompt_index, journal = int(named[1]), RunJournal(run_dir)
    about = journal.parts_about(prompt_index)
    begun = journal.state_before(about.start)
    if begun is None:  # its snapshot is damaged, so read the state from the beginning
        about, begun = range(about.stop), JournalState(Ledger())
    histories = GroupHistories([prompt_index], begun.ledger, begun.driver)
    for position in range(about.start, len(journal.aggregates)) if about else ():
        if position >= about.stop and histories.is_over(prompt_index):
            break
        for number, event in journal.events(range(position, position + 1), begun.ledger):
            histories.take(number, event)
    found = histories.of(prompt_index)
    if not found.moments:
        raise NoSuchGroup(found.group, journal.ledger.totals.drawn, "range")
    logged = find_media().read_logged(run_dir, prompt_index) if histories.has_media else []
    return msgspec.structs.replace(
        found,
        until_unix_s=journal.totals.at_s,
        pictures=logged,
        failures=count_failures(run_dir, found.group),
    )


class GroupHistories:
    """Histories of some groups, event by event.

    Each event is passed only to the groups that it may concern, so a thousand groups cost little
    more than one group.
    """

    def __init__(self, prompt_indices: Iterable[int], ledger: Ledger, driver: str = "") -> None:
        """Create the histories of these groups.

        ``ledger`` must have applied each event before the event is passed to ``take``. ``driver``
        is the driver of the incarnation that contains or precedes the first event.
        """
        self._ledger = ledger
        self._workers = _LostWorkers()
        self._builders = {
            each: _GroupHistoryBuilder(each, ledger, driver, self._workers)
            for each in prompt_indices
        }
        self._version, self._until_unix_s = ledger.trainer_version, 0.0
        self.has_media = False
        """Whether the prompt of one of the groups has media, according to committed attempts."""

    def take(self, number: int, event: AnyEvent) -> None:
        """Add the next event, which has this ``number`` in the journal."""
        self._workers.take(event)
        for prompt_index in self._about(event):
            builder = self._builders[prompt_index]
            builder.moments += (
                GroupEvent(number, event.unix_s, self._version, *described)
                for described in builder.describe(event)
            )
        self._version, self._until_unix_s = self._ledger.trainer_version, event.unix_s

    def of(self, prompt_index: int) -> GroupHistory:
        """Return the history of one of the groups. It is empty if the group was never drawn."""
        return GroupHistory(
            run_id=self._ledger.run_id,
            group=group_id(prompt_index),
            moments=self._builders[prompt_index].moments,
            now=self._builders[prompt_index].now(),
            until_unix_s=self._until_unix_s,
        )

    def is_over(self, prompt_index: int) -> bool:
        """Return whether only a rewind can still change one of the groups."""
        return self._builders[prompt_index].is_over()

    def _about(self, event: AnyEvent) -> Iterable[int]:
        match event:
            case Admitted() | Dispatched() | Returned() | Dropped():
                return (event.prompt_index,) if event.prompt_index in self._builders else ()
            case Committed():
                index = event.receipt.prompt_index
                if index not in self._builders:
                    return ()
                self.has_media |= any(
                    name.startswith(MEDIA_PREFIX) for name in event.receipt.columns
                )
                return (index,)
            case Claimed() | StepIntent() | StepApplied():
                return [index for index in event.prompt_indices if index in self._builders]
            case Opened() | Rewound() | StepRefused() | Unclaimed() | Checkpointed():
                return self._builders
            case _:
                return ()


class _LostWorkers:
    """Environment workers that were lost, in the order of the events.

    No record names the worker of a group. But if a group was lost with its worker, this must be one
    of the workers that were lost since the group's dispatch.
    """

    def __init__(self) -> None:
        self.events = 0  # events about workers so far
        self._lost = dict[str, tuple[float, str]]()  # when each returned, and why it was lost

    def take(self, event: AnyEvent) -> None:
        """Add the next event."""
        match event:
            case WorkerLost():
                self.events += 1
                self._lost[event.worker] = math.inf, event.reason
            case Joined(component=Component.WORKER) if event.name in self._lost:
                self.events += 1
                self._lost[event.name] = self.events, self._lost[event.name][1]
            case _:
                pass

    def since(self, events: int) -> Iterator[str]:
        """Yield the workers that were lost after this many events, each with the reason."""
        for worker, (back_at, reason) in sorted(self._lost.items()):
            if back_at > events:
                yield f"{worker} was lost: {reason}"


class _GroupHistoryBuilder:
    """Builds the history of one group from the events."""

    def __init__(
        self, prompt_index: int, ledger: Ledger, driver: str, workers: _LostWorkers
    ) -> None:
        self.prompt_index, self._ledger = prompt_index, ledger
        self.moments = list[GroupEvent]()
        self._was: Place | None = None
        self._driver, self._workers = driver, workers
        self._sent_at = 0  # events about workers before its last dispatch
        self._ended = ""  # how it left the ledger, or empty while it is in it
        self._trained_in = 0  # version that trained it, 0 if none

    def now(self) -> str:
        """Return where the group is after the last event."""
        group = self._ledger.groups.get(self.prompt_index)
        return self._ended if group is None else _whereabouts(group)

    def is_over(self) -> bool:
        """Return whether the group has left the table, and is saved if it was trained."""
        return self.prompt_index not in self._ledger.groups and not self._trained_in

    def describe(self, event: AnyEvent) -> Iterator[tuple[str, str]]:  # noqa: C901, PLR0912 - the table of events
        """Yield short and full descriptions of the applied event's effect on the group.

        If the event names groups, this group must be one of them.
        """
        group = self._ledger.groups.get(self.prompt_index)
        was, self._was = self._was, None if group is None else group.place
        match event:
            case Claimed():
                yield "claimed", _at_step(event)
            case StepIntent():
                yield "to be applied", f"{_at_step(event)}: recorded before the call to the trainer"
            case StepApplied():
                self._trained_in = event.version
                self._ended = f"trained in step {event.step}, which made version {event.version}"
                yield "trained", f"{_at_step(event)}, which made version {event.version}"
            case StepRefused() if was is Place.TRAINING:
                self._ended = f"dropped: step {event.step} was not applied ({event.reason})"
                yield "dropped", f"step {event.step} was not applied: {event.reason}"
            case Unclaimed() if was is Place.TRAINING:
                yield (
                    "ready again",
                    f"{_step_attempt(event.attempt)} at step {event.step} was aborted",
                )
            case Rewound():
                yield from self._rewound(event, was)
            case Checkpointed() if 0 < self._trained_in <= event.version:
                yield "saved", f"in the checkpoint of version {event.version}"
                self._trained_in = 0
            case Opened():
                before, self._driver = self._driver, event.driver
                if group is not None:
                    what = "new controller" if event.driver == before else "resumed"
                    yield what, f"incarnation {event.incarnation} takes over"
            case Admitted():
                step = event.target_step
                yield "drawn", "for any step" if step is None else f"for step {step}"
            case Dispatched():
                self._sent_at = self._workers.events
                detail = f"attempt {event.attempt} to {event.engine}, which serves version "
                yield "dispatched", f"{detail}{event.version}"
            case Returned():
                is_with_it = event.reason == WORKER_LOST
                lost = self._workers.since(self._sent_at) if is_with_it else ()
                detail = f"attempt {event.attempt}: {event.kind}, {event.reason}"
                yield "returned", "; ".join([detail, *lost])
            case Committed():
                yield "committed", _describe_received(event.receipt)
            case Dropped():
                how = "filtered out" if event.reason is DropReason.FILTERED else "dropped"
                shrinks = f"; step {event.shrinks} goes without it" if event.shrinks else ""
                self._ended = f"{how}: {event.label}"
                yield how, f"{event.label}{shrinks}"
            case _:
                pass

    def _rewound(self, event: Rewound, was: Place | None) -> Iterator[tuple[str, str]]:
        """Describe a rewind.

        Trained groups return. So do ready groups that have tokens of an undone version.
        """
        back = f"to version {event.target}, lineage {event.lineage}: {event.reason}"
        if was is None and self._was is not None:
            self._trained_in = 0
            yield "rewound", f"{back}; it was trained since, and is to be rolled out again"
        elif was in (Place.READY, Place.TRAINING) and self._was is Place.ADMITTED:
            yield "rewound", f"{back}; it has tokens of an abandoned version"
        elif was is Place.TRAINING:
            yield "rewound", f"{back}; its step was open"


def _at_step(event: Claimed | StepIntent | StepApplied) -> str:
    return f"step {event.step}, {_step_attempt(event.attempt)}"


def _step_attempt(attempt: int) -> str:
    """Return a step's attempt as its controller counts it. The upper half is the incarnation."""
    incarnation, number = divmod(attempt, 1 << 32)
    return f"attempt {number}" + (f" of controller {incarnation}" if incarnation > 1 else "")


def _whereabouts(group: GroupRecord) -> str:
    match group.place:
        case Place.ADMITTED:
            return f"admitted, to be dispatched as attempt {group.attempt + 1}"
        case Place.IN_FLIGHT:
            return f"in flight on {group.engine}, attempt {group.attempt}"
        case Place.READY:
            return f"ready, waits for the trainer; oldest token of version {group.oldest_version}"
        case Place.TRAINING:
            return "training, in the open step"


def _describe_received(receipt: Receipt) -> str:
    """Describe a finished group."""
    rewards = receipt.valid_rewards
    shown = " ".join(
        f"{reward:g}" if valid else "masked"
        for reward, valid in zip(receipt.rewards[:_SHOWN], receipt.valid, strict=False)
    )
    more = f" and {receipt.samples - _SHOWN} more" if receipt.samples > _SHOWN else ""
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    versions = sorted({version for spans in receipt.version_spans for version, _ in spans})
    return "; ".join([
        *([f"environment {receipt.environment}"] if receipt.environment else []),
        f"attempt {receipt.attempt} from {receipt.engine}",
        f"rewards {shown}{more} (mean {mean:.3g})",
        f"response tokens {_range(receipt.response_tokens)}",
        f"versions {_range(versions)}",
        "finished by " + ", ".join(
            f"{reason} {count}" for reason, count in Counter(receipt.finish_reasons).most_common()
        ),
        *_describe_failed_samples(receipt),
        f"{receipt.generate_s:.3g} s in the engine, {receipt.reward_s:.3g} s in the environment",
    ])  # fmt: skip


def _describe_failed_samples(receipt: Receipt) -> Iterator[str]:
    """Yield descriptions of failed model calls, branches and samples, if any."""
    if receipt.turns:
        yield f"turns {_range(receipt.turns)}"
    if receipt.branches:
        yield f"branches {_range(receipt.branches)}"
    if receipt.refused_requests:
        yield f"requests refused {_range(receipt.refused_requests)}"
    for sample, failure in enumerate(receipt.failures):
        if failure is not SampleFailure.NONE:
            retries, valid = receipt.retries[sample], receipt.valid[sample]
            how = f"valid after {retries} retries" if valid else f"masked after {retries} retries"
            yield f"sample {sample} failed ({failure}), {how}"


def _range(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    if not found:
        return "none"
    return f"{found[0]}" if found[0] == found[-1] else f"{found[0]} to {found[-1]}"

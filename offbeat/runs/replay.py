"""``offbeat replay``: computes a run's state from its journal again, and compares the files."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from offbeat.controller.events import AnyEvent, Checkpointed, Opened, Rewound, StepRefused
from offbeat.controller.group_table import GroupRecord
from offbeat.controller.journal import JournalCorrupt, differing_aggregates, recover
from offbeat.controller.ledger import Ledger
from offbeat.controller.run_stats import RunStats, summarize
from offbeat.messages.text import cut, printable
from offbeat.run_files.limits import SUMMARY_BYTES, DamagedFile, read_json
from offbeat.runs.directory import SUMMARY
from offbeat.runs.past_run import clock_time, find_journal, fold_events, never_began
from offbeat.telemetry.summary import Summary

_LONGEST: Final = 200  # characters of a value
_SHOWN: Final = 10  # checkpoints, rewinds and incarnations at each end of a printed list


class ControllerIncarnation(msgspec.Struct):
    """One incarnation of the controller, with the times of its first and last event.

    A time is 0 if unknown.
    """

    incarnation: int
    resumed: bool  # whether offbeat train --resume began it
    began_unix_s: float
    ended_unix_s: float

    def to_text(self) -> str:
        """Format the incarnation in a few words."""
        how = "resumed " if self.resumed else ""
        if not self.began_unix_s:
            return f"incarnation {self.incarnation} {how}".rstrip()
        began, ended = clock_time(self.began_unix_s), clock_time(self.ended_unix_s)
        return f"incarnation {self.incarnation} {how}from {began} to {ended}"


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Result of replaying a run's journal, with all contradictions."""

    run_id: str
    events: dict[str, int]  # by kind
    incarnations: list[ControllerIncarnation]  # of the controller, in order
    rewinds: list[Rewound]
    lineage: int
    trainer_version: int  # steps applied in this lineage
    steps_refused: int
    checkpoints: list[int]  # versions, of all lineages
    weights_digest: str | None
    groups: dict[str, int]  # ``drawn`` is the sum of all others
    dropped: dict[str, int]  # by reason
    retried: dict[str, int]  # by reason
    evicted: int
    restarts: dict[str, int]  # of engines, workers and the trainer, over all incarnations
    engines_retired: list[str]
    worker_losses: int  # of environment workers, including workers that returned
    workers_lost: list[str]  # workers that had not returned
    summary: Literal["agrees", "differs", "of an earlier incarnation", "not written"]
    ended: str  # from the summary: outcome, and the error if any
    differences: list[str]  # one line each

    @property
    def agrees(self) -> bool:
        """Return whether the journal contradicts neither itself nor any other file on disk."""
        return not self.differences

    def to_json(self) -> str:
        """Encode as indented JSON with a final newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"

    def to_text(self) -> str:
        """Format the result as text with a final newline."""
        rows = {
            "events": f"{sum(self.events.values())}: {_list_counts(self.events)}",
            "controller": "\n".join(_shorten([each.to_text() for each in self.incarnations]))
            or "no incarnation yet",
            "groups": self._equation(),
            "dropped": _list_counts(self.dropped),
            "retried": _list_counts(self.retried)
            + (f"; {self.evicted} evicted" * bool(self.evicted)),
            "steps": f"{self.trainer_version} applied, {self.steps_refused} refused",
            "restarts": _list_counts(self.restarts)
            + (f"; retired: {', '.join(self.engines_retired)}" * bool(self.engines_retired)),
            "workers": f"lost {self.worker_losses} times"
            + (f"; not back: {', '.join(self.workers_lost)}" * bool(self.workers_lost)),
            "lineage": self._lineage(),
            "checkpoints": f"versions {_join(self.checkpoints)}" if self.checkpoints else "none",
            "weights": self.weights_digest or "none published",
            SUMMARY: self._summary(),
        }
        width = max(map(len, rows))
        below = "\n" + " " * (width + 2)
        lines = [f"{name:<{width}}  {value}".replace("\n", below) for name, value in rows.items()]
        verdict = "the journal and the run's other files agree"
        if self.differences:
            verdict = f"{len(self.differences)} differences:"
        return (
            "\n".join([self.run_id or "no incarnation yet", *lines, verdict, *self.differences])
            + "\n"
        )

    def _summary(self) -> str:
        """Return the summary's report of the end, unless it belongs to a different incarnation."""
        if self.summary == "not written":
            return (
                f"{self.summary}: the run is alive, was killed, or its disk was full "
                "(offbeat train --resume finds out)"
            )
        return f"{self.summary}: {printable(self.ended)}" if self.ended else self.summary

    def _equation(self) -> str:
        rest = [f"{count} {place}" for place, count in self.groups.items() if place != "drawn"]
        return f"{self.groups['drawn']} drawn = {' + '.join(rest)}"

    def _lineage(self) -> str:
        back = _shorten([f"to version {each.target} ({each.reason})" for each in self.rewinds])
        return f"{self.lineage}" + ("".join(f"; rewound {each}" for each in back))


def replay(run_dir: Path) -> Replay:
    """Compute the state from the journal's first event and from its newest snapshot, and compare.

    Also compare the aggregates next to the snapshots. This works on a live run, too: events written
    meanwhile may or may not be counted.

    Raises:
        NotARun: The journal is missing, or the run ended before its first record.
        NoRegularFile, FileTooLarge: The directory has a file that no run writes.
        JournalCorrupt: A file of the journal is damaged.
        ImpossibleEvent: An event does not fit the earlier events.
    """
    journal = find_journal(run_dir)
    story = _Story()
    for _, event in fold_events(journal, story.ledger):
        story.take(event)
    if not story.incarnations and (run_dir / SUMMARY).exists():
        raise never_began(run_dir)
    differences = list(_between_folds(journal, story.ledger))
    if not differences:  # else the newest snapshot, the source of the aggregates, is wrong
        differences += differing_aggregates(journal)
    state, ended, found = _compare_with_summary(story, run_dir / SUMMARY)
    ledger = story.ledger
    return Replay(
        run_id=ledger.run_id,
        events=dict(story.kinds),
        incarnations=story.incarnations,
        rewinds=story.rewinds,
        lineage=ledger.lineage,
        trainer_version=ledger.trainer_version,
        steps_refused=story.kinds[StepRefused.__name__],
        checkpoints=story.checkpoints,
        weights_digest=ledger.digest,
        groups={**ledger.counts(), "dropped": sum(ledger.totals.dropped.values())},
        dropped=ledger.totals.dropped,
        retried=ledger.totals.retried,
        evicted=ledger.totals.evicted,
        restarts={part.value: n for part, n in story.stats.costs.restarts.items()},
        engines_retired=sorted(story.stats.costs.retired),
        worker_losses=story.stats.costs.worker_losses,
        workers_lost=sorted(story.stats.costs.lost_workers),
        summary=state,
        ended=ended,
        differences=[*differences, *found],
    )


class _Story:
    """Collects facts of the journal that the ledger does not keep."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.stats = RunStats()
        self.kinds = Counter[str]()
        self.incarnations = list[ControllerIncarnation]()
        self._driver = ""
        self.rewinds = list[Rewound]()
        self.checkpoints = list[int]()
        self.at_ends = list[dict[str, Any]]()  # one per earlier incarnation

    def take(self, event: AnyEvent) -> None:
        """Add an event that the ledger has applied."""
        self.kinds[type(event).__name__] += 1
        match event:
            case Opened():
                if self.incarnations:
                    self.at_ends.append(self.compute_expected())
                resumed = bool(self.incarnations) and event.driver != self._driver
                self.incarnations.append(
                    ControllerIncarnation(event.incarnation, resumed, event.unix_s, event.unix_s)
                )
                self._driver = event.driver
            case Rewound():
                if self.rewinds and self.rewinds[-1].lineage == event.lineage:
                    self.rewinds.pop()  # another part of the same rewind
                # It may undo every group.
                brief = msgspec.structs.replace(event, undone=(), rewards=())
                self.rewinds.append(brief)
            case Checkpointed():
                self.checkpoints.append(event.version)
            case _:
                pass
        self.stats.add(event)
        if self.incarnations:
            self.incarnations[-1].ended_unix_s = event.unix_s

    def compute_expected(self) -> dict[str, Any]:
        """Return the expected figures of a summary at the end of the last incarnation."""
        run_id = self.ledger.run_id
        summary = summarize(
            self.ledger, self.stats.totals, run_id=run_id, name="", steps_asked=0, outcome="aborted", error=None
        )  # fmt: skip
        # The ledger may have applied the event that opens the next incarnation.
        return _figures(summary) | {"controller_incarnations": len(self.incarnations)}


# --- two folds -----------------------------------------------------------------------------------


def _between_folds(journal: Path, whole: Ledger) -> Iterator[str]:
    """Yield differences between the states from the newest snapshot and from the first event."""
    try:
        recovered = recover(journal)
    # Damage in events that the fold from the first event read without an error
    except JournalCorrupt as error:
        yield f"the newest snapshot is not of the events before it: {error.problem}"
        return
    wanted, got = _state(recovered), _state(whole)
    if wanted == got or _was_once(journal, recovered, wanted):
        return
    for name in wanted:
        if wanted[name] != got[name]:
            snapshot, whole_fold = cut(str(wanted[name]), _LONGEST), cut(str(got[name]), _LONGEST)
            yield f"{name}: {snapshot} by the newest snapshot, {whole_fold} by the first event on"


def _was_once(journal: Path, recovered: Ledger, wanted: Mapping[str, Any]) -> bool:
    """Return whether both states agreed at some event. A live run may have continued since then."""
    ledger, counts = Ledger(), recovered.counts()
    return any(
        ledger.trainer_version == recovered.trainer_version
        and ledger.counts() == counts
        and _state(ledger) == wanted
        for _ in fold_events(journal, ledger)
    )


def _state(ledger: Ledger) -> dict[str, Any]:
    """Return the complete state, except the order of groups that are neither ready nor claimed."""
    whole = msgspec.structs.asdict(ledger.snapshot())
    groups: list[GroupRecord] = whole.pop("groups")
    ordered = [*ledger.training, *ledger.ready]
    whole["groups"] = {group.prompt_index: msgspec.to_builtins(group) for group in groups}
    return {**msgspec.to_builtins(whole), "ready and claimed, in order": ordered}


# --- the summary ---------------------------------------------------------------------------------

_COMPARED: Final = (
    *("run_id", "trainer_version", "weights_digest"),
    *("restarts", "worker_restarts", "trainer_restarts", "engines_retired"),
    *("worker_losses", "workers_lost", "rewinds", "controller_incarnations", "resumes"),
)
_Agreement = Literal["agrees", "differs", "of an earlier incarnation", "not written"]


def _compare_with_summary(story: _Story, path: Path) -> tuple[_Agreement, str, list[str]]:
    """Compare with the summary. Return the agreement, the recorded end, and the differences."""
    if not path.exists():
        return "not written", "", []
    try:
        summary = read_json(path, SUMMARY_BYTES, Summary)
    except DamagedFile as error:
        return "differs", "", [f"{SUMMARY} cannot be read: {error.problem}"]
    why = summary.error or (summary.ended_by and f"ended by {summary.ended_by}")
    ended = f"{summary.outcome}: {why}" if why else summary.outcome
    said = _figures(summary)
    found = story.compute_expected()
    if said == found:
        return "agrees", ended, []
    if said in story.at_ends:
        return "of an earlier incarnation", ended, []
    differences = [
        f"{name}: {value} in {SUMMARY}, {found[name]} in the journal"
        for name, value in said.items()
        if value != found[name]
    ]
    return "differs", ended, differences


def _figures(summary: Summary) -> dict[str, Any]:
    """Return those figures of a summary that the journal alone determines."""
    whole = msgspec.structs.asdict(summary)
    groups = msgspec.structs.asdict(summary.groups)
    return {name: whole[name] for name in _COMPARED} | {
        f"groups.{name}": value for name, value in groups.items()
    }


# --- words ---------------------------------------------------------------------------------------


def _list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def _join(numbers: list[int]) -> str:
    return ", ".join(_shorten([str(number) for number in numbers]))


def _shorten(texts: list[str]) -> list[str]:
    """Return the texts. Of very many, return the first, the last and the number of others."""
    between = len(texts) - 2 * _SHOWN
    return (
        texts if between <= 0 else [*texts[:_SHOWN], f"... {between:,} more ...", *texts[-_SHOWN:]]
    )

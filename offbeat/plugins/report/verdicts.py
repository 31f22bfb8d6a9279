"""Outcome of a run, cards and advice, for the top of the page."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from offbeat.plugins.report.timeline import Incident, IncidentKind
from offbeat.telemetry.applied_steps import count_window
from offbeat.telemetry.status_file import NamedWait
from offbeat.telemetry.summary import Summary, duration
from offbeat.telemetry.time_accounting import NOTICEABLE, Bottleneck, tuning

State = Literal["finished", "aborted", "failed", "running", "unfinished"]
Tone = Literal["", "good", "bad", "warn"]
NOTHING: Final = "\N{EN DASH}"
"""Text for a figure that does not exist."""

_CAUSES: Final = {
    Bottleneck.GENERATORS: "The trainer waits for groups",
    Bottleneck.REWARD: "Groups wait in environment and reward",
    Bottleneck.TRAINER: "The engines wait for the trainer",
    Bottleneck.STALENESS: "Trainer and engines wait in turns",
    Bottleneck.SYNC: "Weight syncs take the time",
    Bottleneck.INCIDENT: "The incidents below take the time",
    Bottleneck.BALANCED: f"No waiting takes more than {NOTICEABLE:.0%} of the time",
}


_NEAR_DEADLINE: Final = 0.5
_NOTICEABLE_S: Final = 5.0


class Card(msgspec.Struct, frozen=True):
    """One fact at the top of the page."""

    title: str
    value: str
    note: str = ""
    tone: Tone = ""


class Verdict(msgspec.Struct, frozen=True):
    """State of a run with its cards and one sentence of advice."""

    state: State
    tone: Tone
    headline: str
    advice: str
    cards: list[Card]


def verdict_of(
    state: State,
    summary: Summary,
    bound: int | None,
    incidents: list[Incident],
    waits: Sequence[NamedWait] = (),
    counts: Counter[IncidentKind] | None = None,
    recipe: Mapping[str, object] | None = None,
) -> Verdict:
    """Return the top of the page. Only a healthy run receives tuning advice.

    ``waits`` are the waits in progress of a live run. ``counts`` counts all incidents if
    ``incidents`` has only some. ``recipe`` has the run's values by dotted key.
    """
    counts = Counter(each.what for each in incidents) if counts is None else counts
    tone: Tone = {"finished": "good", "failed": "bad", "running": ""}.get(state, "warn")  # pyright: ignore[reportAssignmentType]
    advice = _alarm(waits) or _advice(state, summary, incidents, recipe or {})
    if state == "finished" and (warning := summary.signal_warning):
        look = "Look at prompts, answers and rewards: offbeat preview RUN/config.yaml"
        tone, advice = "warn", f"{warning} {look}"
    return Verdict(
        state, tone, _headline(state, summary), advice,
        list(_cards(state, summary, bound, counts)),
    )  # fmt: skip


def _headline(state: State, summary: Summary) -> str:
    if summary.error:
        return summary.error
    steps = f"{summary.steps:,} of {summary.steps_asked:,} steps"
    match state:
        case "running":
            return f"{steps} so far"
        case "unfinished":
            return (
                f"{steps}; it wrote no summary: it is still running, or everything was "
                "killed at once"
            )
        case _:
            return f"{steps}; ended by {summary.ended_by}" if summary.ended_by else steps


def _alarm(waits: Sequence[NamedWait]) -> str:
    """Return a sentence on the wait nearest to its deadline, or "" if none is near."""
    timed = [(each.for_s / each.deadline_s, each) for each in waits if each.deadline_s]
    spent, wait = max(timed, key=lambda pair: pair[0], default=(0.0, None))
    if wait is None or spent < _NEAR_DEADLINE or wait.for_s < _NOTICEABLE_S:
        return ""
    return (
        f"{wait.waiter} has waited {duration(wait.for_s)} for {wait.target}, "
        f"of at most {duration(wait.deadline_s or 0.0)}."
    )


def _advice(
    state: State, summary: Summary, incidents: list[Incident], recipe: Mapping[str, object]
) -> str:
    down = [each for each in incidents if each.is_down]
    if state in {"failed", "aborted"}:
        return (
            "Fix the cause in the error. Then offbeat train --resume RUN continues from the "
            "last checkpoint."
        )
    if state == "unfinished":
        return (
            "offbeat train --resume RUN finds out: it refuses if the run is alive, else continues."
        )
    if down and state == "running":
        return f"{down[-1].who} has been down since {down[-1].at_s:,.0f} s into the run: see logs/controller.log."
    if not summary.verdict:
        return "No step has been trained yet."
    cause = {str(each): text for each, text in _CAUSES.items()}.get(summary.verdict)
    if cause is None:  # the file is from another version
        return ""
    changes = ", ".join(tuning(summary.verdict, recipe))
    return f"{cause}: {changes}." if changes else f"{cause}."


def _cards(
    state: State, summary: Summary, bound: int | None, counts: Counter[IncidentKind]
) -> list[Card]:
    groups, dropped = summary.groups, sum(summary.groups.dropped.values())
    outstanding = groups.admitted + groups.in_flight + groups.ready + groups.training
    by_reason = ", ".join(f"{label} {count:,}" for label, count in sorted(groups.dropped.items()))
    adds_up = groups.drawn == groups.trained + dropped + outstanding
    kept = bound is None or summary.max_staleness_trained <= bound
    failures = {kind: count for kind, count in counts.most_common() if kind.is_failure}
    others = {kind: count for kind, count in counts.most_common() if not kind.is_failure}
    broken = sum(failures.values())
    return [
        Card("reward", _from_to(summary.reward_first, summary.reward_last), f"means over {count_window(summary.steps)} steps, first and last"),
        *_signal(summary),
        Card("samples trained", f"{_whole(summary.samples_per_s)}/s",
             f"{_whole(summary.tokens_per_s)} tokens/s; {duration(summary.wall_s)} in all"),
        Card("bottleneck", summary.verdict or NOTHING,
             f"busy: trainer {summary.trainer_busy_fraction:.0%}, engines {summary.generator_busy_fraction:.0%}"),
        Card("staleness", f"at most {summary.max_staleness_trained}" if summary.steps else NOTHING,
             f"the bound is {bound}" if bound is not None else "the recipe names no bound",
             "bad" if not kept else "good" if summary.steps else ""),
        Card("groups", f"{groups.trained:,} trained",
             f"{groups.drawn:,} drawn = {groups.trained:,} trained + {dropped:,} dropped + {outstanding:,} outstanding"
             + (f" ({by_reason})" if by_reason else ""),
             "bad" if not adds_up else "warn" if dropped else ""),
        Card("incidents", f"{broken:,}",
             "; also ".join(filter(None, map(_listed, (failures, others))))
             if broken else _listed(others) or ("none" if state != "running" else "none so far"),
            "warn" if broken else "good"),
    ]  # fmt: skip


def count_signals(summary: Summary) -> str:
    """Return the number of steps with a signal, or "" if it is unknown."""
    count, is_whole = summary.steps_with_signal, summary.controller_incarnations == 1
    if count is None:
        return ""
    return f"{count:,} of {summary.steps:,}" if is_whole else f"{count:,} since the last start"


def _signal(summary: Summary) -> Iterator[Card]:
    if counted := count_signals(summary):
        note = "steps with unequal rewards in a group"
        yield Card("signal", counted, note, "warn" if summary.signal_warning else "")


def _listed(counts: Mapping[IncidentKind, int]) -> str:
    return ", ".join(f"{what.value} {count:,}" for what, count in counts.items() if count)


def _from_to(first: float | None, last: float | None) -> str:
    return NOTHING if first is None and last is None else f"{_number(first)} → {_number(last)}"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"  # noqa: PLR2004  two digits

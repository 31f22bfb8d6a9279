"""The figures of a run over all incarnations of its controller."""

from msgspec.structs import replace

from offbeat.controller.events import (
    AnyEvent,
    Opened,
    Rewound,
    Served,
    StepApplied,
)
from offbeat.controller.run_stats import RunStats
from offbeat.controller.stats_records import RunTotals

SERVED = Served("generator-0", "incarnation-1", 1, 0, "digest")


def totals_of(events: list[AnyEvent]) -> RunTotals:
    return RunStats.fold(events).totals


def applied(version: int) -> StepApplied:
    return StepApplied(version, 1, version, (version,), 9, samples=2, tokens=10)


def incarnation(incarnation: int, driver: str, began_s: float, version: int) -> list[AnyEvent]:
    """Weights after 4 s, a step after 10 s, something after 11 s."""
    return [
        replace(Opened("run", incarnation, driver), unix_s=began_s),
        replace(SERVED, unix_s=began_s + 4),
        replace(applied(version), unix_s=began_s + 10),
        replace(SERVED, unix_s=began_s + 11),
    ]


def test_the_times_of_all_incarnations_are_summed_without_what_was_between_them() -> None:
    totals = totals_of([*incarnation(1, "a", 1000, 1), *incarnation(2, "b", 5000, 2)])
    assert (totals.wall_s, totals.serving_s) == (22, 14)
    assert (totals.samples, totals.tokens) == (4, 20)
    assert totals.first_step_s == 10


def test_an_incarnation_that_the_same_process_started_is_no_resume() -> None:
    incarnations = [
        *incarnation(1, "a", 1000, 1),
        *incarnation(2, "a", 2000, 2),
        *incarnation(3, "b", 3000, 3),
    ]
    assert totals_of(incarnations).resumes == 1


def test_a_step_that_a_rewind_undid_took_its_time() -> None:
    undone = [*incarnation(1, "a", 1000, 1), replace(Rewound(0, 1, "lost"), unix_s=1012)]
    totals = totals_of(undone)
    assert (totals.samples, totals.wall_s) == (2, 12)


def test_of_a_journal_without_times_nothing_is_said_of_speed() -> None:
    events = [replace(event, unix_s=0.0) for event in incarnation(1, "", 1000, 1)]
    totals = totals_of(events)
    assert (totals.wall_s, totals.serving_s, totals.first_step_s) == (0, 0, 0)


def test_a_clock_that_is_set_back_takes_no_time_away() -> None:
    events = [
        *incarnation(1, "a", 1000, 1),
        replace(SERVED, unix_s=900),
        replace(SERVED, unix_s=903),
    ]
    assert totals_of(events).wall_s == 14

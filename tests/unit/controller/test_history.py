"""The figures of a run over all incarnations of its controller."""

from msgspec.structs import replace

from offbeat.controller.events import (
    AnyEvent,
    Opened,
    Rewound,
    Served,
    StepApplied,
)
from offbeat.controller.history import History

SERVED = Served("generator-0", "incarnation-1", 1, 0, "digest")


def history_of(events: list[AnyEvent]) -> History:
    history = History()
    for event in events:
        history.take(event)
    return history


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
    history = history_of([*incarnation(1, "a", 1000, 1), *incarnation(2, "b", 5000, 2)])
    assert (history.wall_s, history.serving_s) == (22, 14)
    assert (history.samples, history.tokens) == (4, 20)
    assert history.first_step_s == 10


def test_an_incarnation_that_the_same_process_started_is_no_resume() -> None:
    incarnations = [
        *incarnation(1, "a", 1000, 1),
        *incarnation(2, "a", 2000, 2),
        *incarnation(3, "b", 3000, 3),
    ]
    assert history_of(incarnations).resumes == 1


def test_a_step_that_a_rewind_undid_took_its_time() -> None:
    undone = [*incarnation(1, "a", 1000, 1), replace(Rewound(0, 1, "lost"), unix_s=1012)]
    history = history_of(undone)
    assert (history.samples, history.wall_s) == (2, 12)


def test_of_a_journal_without_times_nothing_is_said_of_speed() -> None:
    events = [replace(event, unix_s=0.0) for event in incarnation(1, "", 1000, 1)]
    history = history_of(events)
    assert (history.wall_s, history.serving_s, history.samples) == (0, 0, 0)


def test_a_clock_that_is_set_back_takes_no_time_away() -> None:
    events = [
        *incarnation(1, "a", 1000, 1),
        replace(SERVED, unix_s=900),
        replace(SERVED, unix_s=903),
    ]
    assert history_of(events).wall_s == 14

"""The figures of a run over all lives of its controller."""

import pytest
from msgspec.structs import replace

from offbeat.controller.events import (
    AnyEvent,
    Committed,
    Opened,
    Rewound,
    Served,
    StepApplied,
)
from offbeat.controller.history import History
from offbeat.messages.groups import Receipt

SERVED = Served("generator-0", "life-1", 1, 0, "digest")


def committed(ordinal: int) -> Committed:
    return Committed(
        Receipt(
            ordinal=ordinal,
            attempt=1,
            engine="generator-0",
            engine_incarnation="life-1",
            rewards=(0.0, 1.0),
            prompt_tokens=(3, 3),
            response_tokens=(2, 2),
            valid_tokens=(2, 2),
            finish_reasons=("stop", "stop"),
            version_spans=(((0, 2),), ((0, 2),)),
            columns=("response_ids",),
            payload_bytes=10,
        )
    )


def life(incarnation: int, driver: str, began_s: float, version: int) -> list[AnyEvent]:
    """Weights after 4 s, a step after 10 s, something after 11 s."""
    return [
        replace(Opened("run", incarnation, driver), unix_s=began_s),
        replace(SERVED, unix_s=began_s + 4),
        replace(committed(version), unix_s=began_s + 9),
        replace(StepApplied(version, 1, version, (version,), 9), unix_s=began_s + 10),
        replace(SERVED, unix_s=began_s + 11),
    ]


def test_the_times_of_all_lives_are_summed_without_what_was_between_them() -> None:
    history = History.of([*life(1, "a", 1000, 1), *life(2, "b", 5000, 2)])
    assert (history.wall_s, history.serving_s) == (22, 14)
    assert (history.samples, history.tokens) == (4, 20)
    assert history.first_step_s == 10


def test_a_life_that_the_same_process_started_is_no_resume() -> None:
    lives = [*life(1, "a", 1000, 1), *life(2, "a", 2000, 2), *life(3, "b", 3000, 3)]
    assert History.of(lives).resumes == 1


def test_a_step_that_a_rewind_undid_took_its_time_and_stands_no_more() -> None:
    undone = [*life(1, "a", 1000, 1), replace(Rewound(0, 1, "lost"), unix_s=1012)]
    history = History.of(undone)
    assert (history.samples, history.wall_s) == (2, 12)
    assert history.steps.first is None


def test_of_a_journal_without_times_nothing_is_said_of_speed() -> None:
    events = [replace(event, unix_s=0.0) for event in life(1, "", 1000, 1)]
    history = History.of(events)
    assert (history.wall_s, history.serving_s, history.samples) == (0, 0, 0)
    assert history.steps.first == pytest.approx(0.5)


def test_a_clock_that_is_set_back_takes_no_time_away() -> None:
    events = [*life(1, "a", 1000, 1), replace(SERVED, unix_s=900), replace(SERVED, unix_s=903)]
    assert History.of(events).wall_s == 14

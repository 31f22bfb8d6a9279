"""Incidents that the terminal shows: which events are, and how the controller reports them."""

import pytest

from offbeat.config.sections.rollout import RolloutConfig
from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Dropped,
    DropReason,
    EngineLost,
    Retired,
    Rewound,
    StepRefused,
    TrainerReplaced,
    WorkerLost,
)
from offbeat.controller.outage import OutageBreaker
from offbeat.controller.state import INCIDENTS, IncidentLog
from tests.support.world import World


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (EngineLost("generator-0", "died"), "generator-0 was lost: died"),
        (WorkerLost("environment-1", "hangs"), "environment-1 was lost: hangs"),
        (Retired("generator-0", "died"), "generator-0 is retired: died"),
        (
            TrainerReplaced("the trainer was started anew", found=True),
            "the run continues: a new trainer loads the newest checkpoint",
        ),
        (TrainerReplaced("rank 0 died"), "the trainer was lost and is replaced: rank 0 died"),
        (Rewound(3, 1, "lost"), "rewound to version 3: lost"),
        (Rewound(5, 1, "lost", rewinding_to=3), None),
        (StepRefused(4, 1, "not finite"), "step 4 was not applied: not finite"),
        (Dropped(412, DropReason.DATA, "reward_raised"), "g-000412 was dropped: reward_raised"),
        (Dropped(412, DropReason.FILTERED, "flat"), None),
        (
            EngineLost("generator-0", "two\nlines \x1b[2J"),
            r"generator-0 was lost: two lines \x1b[2J",
        ),
    ],
)
def test_an_event_that_costs_something_is_an_incident(event: AnyEvent, text: str | None) -> None:
    assert type(event) in INCIDENTS
    log = IncidentLog()
    log.add_event(event, 7)
    assert [(each.number, each.step, each.text) for each in log.newest] == (
        [(1, 7, text)] if text else []
    )


def test_other_events_are_none() -> None:
    assert Admitted not in INCIDENTS


def test_only_the_newest_incidents_are_kept_and_their_texts_are_bounded() -> None:
    log = IncidentLog()
    for _ in range(100):
        log.add_event(EngineLost("generator-0", "x" * 10_000), 1)
    assert [each.number for each in log.newest] == [*range(85, 101)]
    assert all(len(each.text) < 400 for each in log.newest)


def test_an_outage_is_one_incident_and_its_end_another() -> None:
    log, outage = IncidentLog(), OutageBreaker(RolloutConfig(outage_failures=2))
    for _ in range(4):
        outage.failed(0.0, "no answer")
        log.observe_outage(outage, 3)
    outage.answered()
    log.observe_outage(outage, 4)
    began, ended = log.newest
    assert "the environment, which failed 2 times in a row" in began.text
    assert (ended.step, ended.text) == (4, "the environment answers again")


def test_the_status_has_time_incidents_and_time_left() -> None:
    world = World({"steps": 3})
    world.run()
    world.built.state.ledger.note(EngineLost("generator-0", "died"))
    status = world.built.progress.status()
    assert [each.text for each in status.incidents] == ["generator-0 was lost: died"]
    assert status.elapsed_s is not None
    assert status.left_s == 0.0

"""The auditor counts the sums of a journal again: it finds those that are wrong, and no others."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.config.loader import load_recipe
from offbeat.controller.events import AnyEvent, Opened, Rewound, StepApplied
from offbeat.controller.run_stats import RunStats
from offbeat.controller.stats_records import Aggregates
from offbeat.plugins.simulation.audit_aggregates import audit_aggregates
from offbeat.plugins.simulation.episode import run_episode
from offbeat.plugins.simulation.schedule import PlannedFault

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"


class KeepsUndoneSteps(RunStats):
    """A rewind takes no step of its part back."""

    def _rewound(self, event: Rewound, before_s: float, at_s: float) -> None:
        rows = list(self._rows)
        super()._rewound(event, before_s, at_s)
        self._rows = rows


class ForgetsRewinds(RunStats):
    """Steps of earlier parts that a rewind undoes stay."""

    def end_part(self, first_segment: int = 0) -> Aggregates:
        self._undone_to = None
        return super().end_part(first_segment)


class KeepsGroupsOfADeadController(RunStats):
    """What a killed controller had dispatched counts as in flight under the next one."""

    def _opened(self, event: Opened, before_s: float, at_s: float) -> None:
        loads, engines = dict(self._load), dict(self.carried.engine_of)
        super()._opened(event, before_s, at_s)
        self._load |= loads
        self._since = dict.fromkeys(loads, at_s)
        self.carried.engine_of |= engines


class ForgetsTheOpenStep(RunStats):
    """A step that is open at a snapshot ends there."""

    def end_part(self, first_segment: int = 0) -> Aggregates:
        part = super().end_part(first_segment)
        self.carried.trainer_since_s = None
        return part


class CountsMaskedSamples(RunStats):
    """Masked samples count as samples of their step."""

    def _applied(self, event: StepApplied, before_s: float, at_s: float) -> None:
        super()._applied(event, before_s, at_s)
        numbers, staleness = self._rows[-1]
        self._rows[-1] = (*numbers[:3], numbers[3] + 1, *numbers[4:]), staleness


class MissesGroups(RunStats):
    """Every fifth group is none that the part is about."""

    def _about(self, prompt_index: int) -> None:
        if prompt_index % 5:
            super()._about(prompt_index)


PLANTED = [
    KeepsUndoneSteps,
    ForgetsRewinds,
    KeepsGroupsOfADeadController,
    ForgetsTheOpenStep,
    CountsMaskedSamples,
    MissesGroups,
]


@pytest.fixture(scope="module", name="journal")
def _journal() -> list[AnyEvent]:
    """A run whose trainer dies twice, and its controller."""
    faults: list[dict[str, Any]] = [
        {"action": "trainer_killed", "target": "trainer", "at_step": 5, "delay_s": 0.2},
        {"action": "controller_killed", "target": "controller", "at_record": 300},
        {"action": "trainer_killed", "target": "trainer", "at_step": 9, "delay_s": 0.2},
    ]
    planned = [PlannedFault(**fault) for fault in faults]
    return run_episode(6, load_recipe(QUICKSTART).config, planned_faults=planned).journal


def test_the_sums_of_a_run_with_rewinds_and_a_restart_are_those_of_its_records(
    journal: list[AnyEvent],
) -> None:
    assert sum(isinstance(event, Rewound) and bool(event.undone) for event in journal)
    assert sum(isinstance(event, Opened) for event in journal) == 2
    assert audit_aggregates(journal) == []


@pytest.mark.parametrize("planted", PLANTED)
def test_sums_that_are_wrong_are_found(planted: type[RunStats], journal: list[AnyEvent]) -> None:
    """Where parts end is drawn by the number of records: one cut may show nothing of a bug."""
    shorter = [journal[: len(journal) - less] for less in range(5)]
    found = [each.invariant for part in shorter for each in audit_aggregates(part, planted)]
    assert set(found) == {"I22"}

"""The auditor is tested too: each bug, planted in the controller, has to be caught.

And only the bug: the same episode, played by the controller as it is, has to be clean.
"""

import inspect
from types import ModuleType

import pytest
from planted import (
    delta_bugs,
    engine_bugs,
    ledger_bugs,
    machine_bugs,
    reshard_bugs,
    rollout_bugs,
    step_bugs,
    turn_bugs,
)
from planted.planting import BASE, Planted

from offbeat.controller.controller import Controller
from offbeat.plugins.simulation.audit_survivors import Survivors
from offbeat.plugins.simulation.audit_world import Findings
from offbeat.plugins.simulation.auditor import Violation, audit
from offbeat.plugins.simulation.draws import EpisodePlan, draw_plan
from offbeat.plugins.simulation.episode import play

SEEDS = range(40)


def bugs_of(*modules: ModuleType) -> list[type[Planted]]:
    return [
        each
        for module in modules
        for _, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, Planted)
        and each.__module__ == module.__name__
        and hasattr(each, "breaks")
    ]


BUGS = bugs_of(
    ledger_bugs,
    rollout_bugs,
    engine_bugs,
    delta_bugs,
    reshard_bugs,
    step_bugs,
    machine_bugs,
    turn_bugs,
)


MISFITS = ("positional argument", "keyword argument", "has no attribute '_", "NameError")
"""How a bug fails that was planted in a controller of another shape: nothing was tested then."""


def violations(seed: int, plan: EpisodePlan, controller_cls: type[Controller]) -> list[Violation]:
    result = play(seed, plan, controller_cls)
    if any(misfit in result.error for misfit in MISFITS):
        pytest.fail(f"it no longer fits the controller: {result.error}")
    return audit(result.journal, result.records, plan.config, prompts=plan.prompts)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug: type[Planted]) -> None:
    for seed in SEEDS:
        plan = bug.plan(seed)
        found = violations(seed, plan, bug)
        if {violation.invariant for violation in found} & bug.breaks:
            assert violations(seed, plan, Controller) == []
            return
    pytest.fail(f"{len(SEEDS)} episodes, and nothing was seen of {bug.__name__}")


def test_drawn_losses_of_machines_last_long_enough_for_the_rule_about_survivors() -> None:
    eligible = 0
    for seed in range(7, 19):
        plan = draw_plan(seed, BASE, "all", None)
        if len(plan.planned_faults) == 1:
            records = play(seed, plan).records
            eligible += len(list(Survivors(plan.config, records, Findings()).find_eligible()))
    assert eligible >= 1


def test_there_are_enough_planted_bugs() -> None:
    assert len(BUGS) >= 20

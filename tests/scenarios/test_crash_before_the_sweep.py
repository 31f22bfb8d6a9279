"""A controller that dies between a step's end and the sweep that follows it.

Ready groups past the staleness bound are left in the buffer, with payloads that are still readable.
Cases of NeMo-RL and AReaL: a resumed run that waits for ever for a batch.
"""

from typing import Any

import pytest

from offbeat.controller.events import StepApplied
from offbeat.controller.failpoints import Failpoint
from tests.support.scenarios import SurvivingPayloads, next_incarnation, outcome, play
from tests.support.world import World


class ControllerKilled(Exception):
    """Stands for the death of the controller."""


def killed_at(point: Failpoint, nth: int, overrides: dict[str, Any]) -> World:
    """Return a run whose controller died when it reached this point for the nth time.

    Its journal ends with the last applied step: nothing after that was durable.
    """
    reached = list[Failpoint]()

    def strike(at: Failpoint) -> None:
        reached.append(at)
        if at is point and reached.count(point) == nth:
            raise ControllerKilled

    world = World(overrides, reached=strike)
    world.rollouts.slow = dict.fromkeys(range(400), 0.3)  # far faster than the trainer
    error, _ = outcome(world)
    assert error is not None and isinstance(error.causes[0], ControllerKilled)
    records = world.journal.events
    last = max(at for at, event in enumerate(records) if isinstance(event, StepApplied))
    world.journal.events = records[: last + 1]
    return world


@pytest.mark.parametrize("freshest_first", [False, True])
@pytest.mark.parametrize("nth", [1, 3, 5, 6, 7])
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_next_controller_evicts_what_the_former_one_had_no_time_to(
    staleness: int, nth: int, *, freshest_first: bool
) -> None:
    sampler = {
        "name": "windowed",
        "max_staleness": staleness,
        "over_sampling_ratio": 2.0,
        "freshest_first": freshest_first,
    }
    overrides = {"steps": 8, "sampler": sampler}
    before = killed_at(Failpoint.APPLIED_DURABLE, nth, overrides)
    world = next_incarnation(before, overrides, payloads=SurvivingPayloads())
    play(world)
    world.assert_ledger_agrees()
    assert len(world.trainer.steps) == 8


def test_an_adopted_step_makes_groups_too_old_as_any_other_does() -> None:
    overrides = {
        "steps": 8,
        "sampler": {"name": "windowed", "max_staleness": 0, "over_sampling_ratio": 3.0},
    }
    before = killed_at(Failpoint.APPLIED_DURABLE, 6, overrides)
    before.journal.events.pop()  # the trainer knows of the step, the journal does not
    world = next_incarnation(before, overrides, payloads=SurvivingPayloads())
    play(world)
    world.assert_ledger_agrees()
    assert len(world.trainer.steps) == 8

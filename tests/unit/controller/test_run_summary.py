"""One story: what a controller sums up at its end is what a reader of its journal adds up."""

import asyncio
from typing import Any, cast

import msgspec
import pytest

from offbeat.controller.commands import Stop
from offbeat.controller.events import AnyEvent
from offbeat.controller.ledger import Ledger
from offbeat.controller.run_stats import RunStats, summarize
from offbeat.controller.stats_records import RunTotals
from tests.support.world import World

BY_CLOCK = frozenset({"wall_s", "first_step_s", "samples_per_s", "tokens_per_s"})
IN_NO_EVENT = frozenset({"loss", "reward_by_environment", "steps_with_signal", "syncs", "versions"})


async def test_the_summary_of_a_controller_is_the_fold_of_its_events() -> None:
    world = World({"samples_per_group": 2})
    controller = world.controller()
    await controller.run()
    told = world.built.progress.summary("run", "finished", None)
    table, stats = Ledger(), RunStats()
    events = cast("list[AnyEvent]", world.journal.events)
    for number, event in enumerate(events, start=1):
        table.apply(event)
        stats.add(msgspec.structs.replace(event, unix_s=float(number)))
    found = summarize(
        table,
        stats.totals,
        run_id="run",
        name=told.name,
        steps_asked=told.steps_asked,
        outcome="finished",
        error=None,
    )
    differing = {
        name
        for name in told.__struct_fields__
        if name not in BY_CLOCK | IN_NO_EVENT and getattr(told, name) != getattr(found, name)
    }
    assert differing == set()
    assert told.steps == told.steps_asked > 0
    assert told.trainer_waits
    assert told.verdict


@pytest.mark.parametrize("reason", ["offbeat control stop", "supervision.wall_clock_limit_s=12"])
async def test_the_summary_of_a_run_that_is_stopped_names_what_ended_it(reason: str) -> None:
    world = World()
    controller = world.controller()
    asyncio.get_running_loop().call_later(12, controller.control, Stop(reason))
    await controller.run()
    told = world.built.progress.summary("run", "finished", None)
    assert 1 <= told.steps < told.steps_asked
    assert told.ended_by == reason
    assert world.built.progress.summary("run", "failed", "a lost rank").ended_by == ""


@pytest.mark.parametrize(
    ("differing", "overrides", "with_signal", "had_none"),
    [
        ((), {}, 0, True),
        ((5,), {}, 1, False),
        ((), {"algorithm": {"loss": {"name": "clipped_pg", "teacher": "x"}}}, None, False),
    ],
)
def test_a_summary_counts_the_steps_whose_rewards_differ(
    differing: tuple[int, ...], overrides: dict[str, Any], with_signal: int | None, had_none: bool
) -> None:
    world = World(overrides)
    equal = {"rewards": (1.0, 1.0)}
    world.rollouts.forged = {prompt: equal for prompt in range(100) if prompt not in differing}
    world.run()
    told = world.built.progress.summary("run", "finished", None)
    assert told.steps == 10
    assert told.steps_with_signal == with_signal
    assert told.had_no_signal is had_none


async def test_a_stop_behind_the_last_step_has_ended_nothing() -> None:
    world = World()
    await world.controller().run()
    world.built.state.operator.stop()
    assert world.built.progress.summary("run", "finished", None).ended_by == ""


def test_a_run_that_took_no_step_has_no_bottleneck() -> None:
    totals = RunTotals()
    totals.tally.trainer_s = {"waiting_groups": 9.0, "compute": 1.0}
    told = summarize(
        Ledger(), totals, run_id="run", name="sums", steps_asked=5, outcome="aborted", error="Stop"
    )
    assert told.verdict == ""
    assert told.trainer_waits == {"waiting_groups": 0.9}

"""The same faults on real actors and in the simulator: both runs end with the same books."""

from pathlib import Path

import pytest

from offbeat.config.loader import load_recipe
from offbeat.controller.ledger import Ledger
from offbeat.simulation import schedule
from offbeat.simulation.campaign import violations_of
from offbeat.simulation.draws import Plan
from offbeat.simulation.episode import play
from offbeat.simulation.schedule import Strike
from tests.ray.conftest import STUB, Start
from tests.support.live_schedule import ENGINES, draw, strike_live, totals
from tests.support.run_records import RunRecords

STEPS = 40
SETTINGS = (
    f"steps={STEPS}",
    f"generator.engines={ENGINES}",
    "checkpoint.interval=4",
    "rollout.deadline_s=2",
    "sync.deadline_s=2",
    "rollout.infrastructure_retries=40",
)
SEEDS = (1, 2)


@pytest.fixture(scope="module", params=SEEDS)
def strikes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Strike]:
    """A seed's schedule, as both sides read it from its file."""
    path: Path = tmp_path_factory.mktemp("schedules") / f"{request.param}.json"
    path.write_text(schedule.dump(draw(request.param, steps=STEPS)))
    return schedule.read(path)


def test_real_actors_and_the_simulator_end_a_schedule_of_faults_with_the_same_books(
    start: Start, strikes: list[Strike], request: pytest.FixtureRequest
) -> None:
    plan = Plan(load_recipe(STUB, SETTINGS).config, strikes, prompts=None, spools=False, workers=1)
    simulated = play(1, plan)
    assert simulated.outcome == "finished", simulated.error
    assert violations_of(simulated) == []
    assert sorted(simulated.fired) == sorted(strike.action for strike in strikes)

    with start(f"schedule-{request.node.name[-2]}", STUB, *SETTINGS) as run:
        strike_live(run, strikes)
        assert run.exit_code() == 0
        records = RunRecords.read(run.run_dir)
        records.agree()
        records.no_token_is_from_the_future()
        assert records.summary.outcome == "finished"
        run.nothing_is_left()
        run.talks_to_people()

    told = totals(Ledger.fold(records.events))
    assert told == totals(Ledger.fold(simulated.journal)), schedule.dump(strikes)
    assert (told["trained"], told["dropped"]) == (STEPS * plan.config.groups_per_step, {})
    assert (told["lineage"], told["lives"]) == (1, 2)
    assert records.summary.max_staleness_trained <= 1

"""The same faults on real actors and in the simulator: both runs end with the same ledger."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import pytest

from offbeat.config.loader import load_recipe
from offbeat.controller.events import Served
from offbeat.controller.ledger import Ledger
from offbeat.plugins.simulation import schedule
from offbeat.plugins.simulation.campaign import violations_of
from offbeat.plugins.simulation.draws import EpisodePlan
from offbeat.plugins.simulation.episode import EpisodeResult, play
from tests.support.live_run import LiveRun
from tests.support.live_schedule import ENGINES, draw, strike_live, totals
from tests.support.run_records import RunRecords
from tests.support.starting import STUB, Start

STEPS = 40
SEEDS = (1, 2)
SETTINGS = (
    f"steps={STEPS}",
    f"generator.engines={ENGINES}",
    "checkpoint.interval=4",
    "rollout.deadline_s=2",
    "sync.deadline_s=2",
    "rollout.infrastructure_retries=40",
)


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A file a seed; both sides read it."""
    folder = tmp_path_factory.mktemp("schedules")
    files = {seed: folder / f"{seed}.json" for seed in SEEDS}
    for seed, file in files.items():
        file.write_text(schedule.dump(draw(seed, steps=STEPS)))
    return files


@pytest.fixture(scope="module")
def struck(start: Start, schedules: dict[int, Path]) -> Iterator[dict[int, LiveRun]]:
    """The runs, each struck as its schedule says; side by side, since they mostly wait."""
    with ExitStack() as open_runs:
        runs = {
            seed: open_runs.enter_context(start(f"schedule-{seed}", STUB, *SETTINGS))
            for seed in SEEDS
        }

        def strike(seed: int) -> int:
            strike_live(runs[seed], schedule.read(schedules[seed]))
            return runs[seed].exit_code()

        with ThreadPoolExecutor(len(SEEDS)) as strikers:
            assert list(strikers.map(strike, SEEDS)) == [0] * len(SEEDS)
        yield runs


def simulated(file: Path) -> EpisodeResult:
    """The schedule of a file, played with the numbers of the recipe."""
    planned_faults = schedule.read(file)
    plan = EpisodePlan(
        load_recipe(STUB, SETTINGS).config, planned_faults, prompts=None, spools=False, workers=1
    )
    episode = play(1, plan)
    assert episode.outcome == "finished", episode.error
    assert violations_of(episode) == []
    assert sorted(episode.fired) == sorted(strike.action for strike in planned_faults)
    return episode


@pytest.mark.parametrize("seed", SEEDS)
def test_real_actors_and_the_simulator_end_a_schedule_of_faults_with_the_same_ledger(
    struck: dict[int, LiveRun], schedules: dict[int, Path], seed: int
) -> None:
    records = RunRecords.read(struck[seed].run_dir)
    told = totals(Ledger.fold(records.events))
    assert told == totals(Ledger.fold(simulated(schedules[seed]).journal)), schedules[seed]
    assert (told["drawn"], told["trained"], told["dropped"]) == (4 * STEPS, 4 * STEPS, {})
    assert (told["trainer_version"], told["lineage"], told["incarnations"]) == (STEPS, 1, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_records_of_a_run_agree_after_a_schedule_of_faults(
    struck: dict[int, LiveRun], seed: int
) -> None:
    run = struck[seed]
    records = RunRecords.read(run.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    assert records.summary.outcome == "finished"
    assert records.summary.max_staleness_trained <= 1
    incarnations = {event.incarnation for event in records.events if isinstance(event, Served)}
    assert len(incarnations) > ENGINES, "an engine came back"
    for who in ("trainer", "generator"):
        column = [line[f"busy/{who}_unattributed_fraction"] for line in records.metrics]
        assert fmean(column) <= 0.01
    run.nothing_is_left()
    run.talks_to_people()

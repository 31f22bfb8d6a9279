"""The same faults on real actors and in the simulator: both runs end with the same ledger."""

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
import psutil
import pytest

from offbeat.config.loader import load_recipe
from offbeat.controller.events import Served
from offbeat.controller.ledger import Ledger
from offbeat.plugins.simulation import schedule
from offbeat.plugins.simulation.campaign import violations_of
from offbeat.plugins.simulation.draws import EpisodePlan
from offbeat.plugins.simulation.episode import EpisodeResult, play
from offbeat.plugins.simulation.schedule import PlannedFault
from tests.support.live_run import LiveRun, until
from tests.support.run_records import RunRecords
from tests.support.starting import STUB, Start

ENGINES: Final = 2
THAWED_S: Final = 2.5  # until a frozen process goes on, if nobody has replaced it
_VICTIMS: Final = {
    "engine_killed": "generator-0",
    "engine_frozen": "generator-1",
    "worker_frozen": "environment-0",
    "trainer_killed": "trainer",
    "controller_killed": "controller",
}
_LOGS: Final = {"trainer": "trainer-rank0"}  # the log of a target, where it has another name
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


# --- striking a live run ---


def draw(seed: int, *, steps: int) -> list[PlannedFault]:
    """Every action once, in any order, each some steps after the last."""
    rng = random.Random(seed)
    actions = rng.sample(list(_VICTIMS), len(_VICTIMS))
    apart = (steps - 4) // len(actions)
    return [
        PlannedFault(
            action, _VICTIMS[action], at_step=2 + apart * place + rng.randrange(apart // 2)
        )
        for place, action in enumerate(actions)
    ]


def strike_live(run: LiveRun, planned_faults: Sequence[PlannedFault]) -> None:
    """Kill and freeze the processes of a run as planned; return once all of them have."""
    frozen = list[tuple[float, psutil.Process]]()

    def reached(step: int) -> bool:
        _thaw(frozen)
        return step in _applied(run)

    for strike in sorted(planned_faults, key=lambda each: each.at_step or 0):
        step = strike.at_step or 0
        run.until(f"version {step}, for {strike}", partial(reached, step))
        victim = run.holding(f"{_LOGS.get(strike.target, strike.target)}.log")
        if strike.action.endswith("_killed"):
            victim.kill()
        else:
            victim.suspend()
            frozen.append((time.monotonic() + THAWED_S, victim))
    until("every frozen process goes on", lambda: _thaw(frozen), within_s=2 * THAWED_S)


def _thaw(frozen: list[tuple[float, psutil.Process]]) -> bool:
    """Let go on those whose time has come; true when none is left."""
    for due, process in [each for each in frozen if each[0] <= time.monotonic()]:
        frozen.remove((due, process))
        with contextlib.suppress(psutil.NoSuchProcess):  # it has been replaced
            process.resume()
    return not frozen


def _applied(run: LiveRun) -> set[int]:
    log = run.run_dir / "logs" / "trained-rank0.jsonl"
    whole, _, _ = (log.read_bytes() if log.exists() else b"").rpartition(b"\n")
    return {msgspec.json.decode(line).get("version", 0) for line in whole.splitlines()}


def totals(ledger: Ledger) -> dict[str, object]:
    """What has to be the same on real actors and in the simulator, whatever the timing was."""
    return {
        **ledger.counts(),
        "dropped": dict(ledger.totals.dropped),
        "trainer_version": ledger.trainer_version,
        "lineage": ledger.lineage,
        "incarnations": ledger.incarnation,
    }

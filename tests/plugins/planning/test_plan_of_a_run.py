"""`offbeat plan`: a run's own times, the production controller on a virtual clock, other settings."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from offbeat.config.run import RunConfig
from offbeat.launch.commands.main import app
from offbeat.plugins.planning.prediction import NotPlanned, Pace, predict
from offbeat.plugins.planning.run_plan import measure_run, pace_per_token, plan_run
from offbeat.plugins.planning.shared_cores import SharedCores
from offbeat.plugins.planning.virtual_ports import Costs, GroupWork, SharedEngine
from offbeat.plugins.simulation.loop import VirtualLoop
from offbeat.runs.past_run import NotARun
from tests.support import shown_run

TIMES = Costs(
    alone=1.0, shared=0.0, step_s=2.0, groups=4, publish_s=0.0, load_s=0.5, pause_s=0.0
)  # fmt: skip


def recipe(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "steps": 10,
            "groups_per_step": 4,
            "samples_per_group": 2,
            "model": {"path": "none"},
            "sampler": {"max_staleness": 0},
            "generator": {"backend": "stub"},
            "trainer": {"backend": "stub"},
            "environment": {"name": "stub"},
        }
        | changes
    )


def ends_s(costs: Costs, *lengths: float) -> list[float]:
    """Return when each of these sequences ends, all begun at once on one engine."""
    loop = VirtualLoop(random.Random(0), max_events=10_000, max_s=1e6)

    async def one(engine: SharedEngine, length: float) -> float:
        await engine.decode(GroupWork((length,)))
        return asyncio.get_running_loop().time()

    async def all_of_them() -> list[float]:
        engine = SharedEngine("generator-0", costs, SharedCores(costs.core_use))
        return list(await asyncio.gather(*(one(engine, length) for length in lengths)))

    try:
        return loop.run_until_complete(loop.create_task(all_of_them()))
    finally:
        loop.close()


def test_sequences_share_the_pace_of_their_engine() -> None:
    costs = Costs(1.0, 0.5, 0.0, 1, 0.0, 0.0, 0.0)
    assert ends_s(costs, 10.0) == pytest.approx([15.0])
    # Two side by side take 2 s for a token; the longer one goes on alone at 1.5 s.
    assert ends_s(costs, 10.0, 20.0) == pytest.approx([20.0, 35.0])


def test_a_sequence_without_a_slot_waits_for_one() -> None:
    costs = Costs(1.0, 0.0, 0.0, 1, 0.0, 0.0, 0.0, slots=1)
    assert ends_s(costs, 10.0, 5.0) == pytest.approx([10.0, 15.0])


def test_a_synchronous_step_is_the_sum_of_its_parts_and_an_overlapped_one_the_longest() -> None:
    # A step trains while its groups arrive; all of them take 3 s, so nothing overlaps at bound 0.
    work = [GroupWork((3.0,), response_tokens=10)]
    synchronous = predict(recipe(), TIMES, work)
    assert synchronous.step_s == pytest.approx(3.0 + 2.0 + 0.5, rel=0.02)
    assert synchronous.staleness == 0
    overlapped = predict(recipe(sampler={"max_staleness": 2}), TIMES, work)
    assert overlapped.step_s == pytest.approx(2.0, rel=0.05)
    assert 0 < overlapped.staleness <= 2


@pytest.mark.parametrize(("grows", "times_as_long"), [(True, 1.9), (False, 1.0)])
def test_twice_the_groups_take_a_trainer_longer_and_a_stand_in_as_long(
    *, grows: bool, times_as_long: float
) -> None:
    costs = dataclasses.replace(TIMES, step_grows=grows)
    work = [GroupWork((0.01,), response_tokens=10)]
    four, eight = (predict(recipe(groups_per_step=count), costs, work) for count in (4, 8))
    # What a step waits for besides the trainer is the same: 0.5 s for its weights, 0.01 s for groups.
    trained_s = [each.step_s - 0.51 for each in (four, eight)]
    assert trained_s[0] == pytest.approx(2.0, rel=0.01)
    assert trained_s[1] == pytest.approx(2.0 * times_as_long, rel=0.01)


def test_a_plan_says_what_it_does_not_know_of_the_run(run_dir: Path) -> None:
    run = measure_run(run_dir)
    stand_in = plan_run(run_dir, ["sampler.max_staleness=0"])
    assert not run.shares_cores
    assert "the same time for any number of groups" in " ".join(stand_in.notes)
    engines = {"backend": "embedded"}
    for device, shares in ((), True), (("cuda", 1), False):
        trainer = {"backend": "torch", **dict(zip(("device", "gpus"), device, strict=False))}
        config = recipe(trainer=trainer, generator=engines)
        assert msgspec.structs.replace(run, config=config).shares_cores is shares


def test_the_pace_of_an_engine_is_found_from_times_that_follow_it() -> None:
    dice = np.random.default_rng(0)
    longest, load = dice.uniform(100, 2000, 500), dice.uniform(1, 64, 500)
    times = longest * (0.01 + 0.0002 * load) * dice.uniform(0.97, 1.03, 500)
    assert pace_per_token(times, longest, load) == pytest.approx((0.01, 0.0002), rel=0.1)
    alone, shared = pace_per_token(longest * 0.01, longest, load)
    assert (alone, shared) == pytest.approx((0.01, 0.0), abs=1e-6)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = {
        "groups_per_step": 8,
        "samples_per_group": 8,
        "environment": {"name": "stub"},
        "generator": {"backend": "stub", "engines": 2},
        "trainer": {"backend": "stub"},
    }
    return shown_run.finished(tmp_path_factory.mktemp("plan") / "run", 40, recipe=recipe)


def test_a_run_with_shared_weights_is_planned_without_staleness(tmp_path: Path) -> None:
    recipe = {
        "groups_per_step": 8,
        "samples_per_group": 8,
        "runtime": {"backend": "local"},
        "environment": {"name": "stub"},
        "sampler": {"name": "in_order", "max_staleness": 0},
        "generator": {"share_weights": True},
    }
    run_dir = shown_run.finished(tmp_path / "run", 40, recipe=recipe)
    plan = plan_run(run_dir)
    tried = [change.overrides for change in plan.changes]
    assert tried == [["groups_per_step=4"], ["groups_per_step=16"], ["generator.engines=2"]]
    assert (
        plan.advice == "sampler.max_staleness stays 0, because generator.share_weights needs that."
    )
    with pytest.raises(
        NotPlanned, match=r"cannot work with sampler\.max_staleness=1: samples become stale"
    ):
        plan_run(run_dir, ["sampler.max_staleness=1"])
    plan_run(run_dir, ["sampler.max_staleness=1", "generator.share_weights=false"])


def test_times_of_a_run_come_from_its_directory(run_dir: Path) -> None:
    run = measure_run(run_dir)
    assert run.config.generator.engines == 2
    assert len(run.work) > 200
    assert 0 < run.costs.step_s < run.pace.step_s
    assert run.costs.load_s == pytest.approx(0.006, abs=0.003)
    assert run.pace.samples_per_s == pytest.approx(64 / run.pace.step_s)


def test_changes_are_corrected_by_the_error_for_the_run_itself(run_dir: Path) -> None:
    paces = itertools.cycle((0.1, 0.2))

    def told(config: RunConfig, costs: Costs, work: Any) -> Pace:
        del costs, work
        step_s = next(paces)
        return Pace(step_s, 64 / step_s, float(config.sampler.max_staleness), 0.0, 0.0)

    plan = plan_run(run_dir, ["sampler.max_staleness=1"], predict=told)
    (change,) = plan.changes
    assert change.speedup == pytest.approx(0.5)
    assert change.pace.step_s == pytest.approx(2 * plan.measured.step_s)
    assert change.pace.staleness == 1


def test_the_command_prints_a_table_or_json(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(run_dir), "sampler.max_staleness=0"])
    assert done.exit_code == 0, done.output
    assert "the same, predicted" in done.output
    assert "sampler.max_staleness=0" in done.output
    again = CliRunner().invoke(app, ["plan", str(run_dir), "--length-spread", "0", "--json"])
    (change,) = json.loads(again.output)["changes"]
    assert change["overrides"] == ["lengths x 1, spread x 0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no.such_key=1"], "no.such_key"),
        (["run_dir=x", "generator.engines=2"], "'run_dir=x' changes nothing in a plan"),
        (["--length-scale", "-1"], "Use a scale above 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_one_reason(
    run_dir: Path, arguments: list[str], said: str
) -> None:
    done = CliRunner().invoke(app, ["plan", str(run_dir), *arguments])
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    ("name", "said"), [("missing", "no such directory"), ("empty", "it holds no journal")]
)
def test_a_directory_that_is_no_run_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotARun, match=said):
        plan_run(tmp_path / name)


def test_no_sampler_is_imported_from_the_run_directory(tmp_path: Path) -> None:
    run_dir = shown_run.finished(tmp_path / "run", 12)
    (run_dir / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    tree = yaml.safe_load((run_dir / "config.yaml").read_text())
    tree["sampler"] = {"name": "custom", "target": "run.evil:S", "max_staleness": 1}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree))
    named = r"sampler\.target=run\.evil:S is inside the run directory"
    with contextlib.chdir(tmp_path), pytest.raises(NotPlanned, match=named):
        plan_run(run_dir)
    assert not (tmp_path / "executed").exists()


def test_a_run_of_few_steps_is_not_planned(tmp_path: Path) -> None:
    run_dir = shown_run.finished(tmp_path / "run", 3)
    with pytest.raises(NotPlanned, match="has trained 3 steps; at least 10 are needed"):
        measure_run(run_dir)

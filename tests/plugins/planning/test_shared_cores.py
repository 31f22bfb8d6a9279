"""`offbeat plan --cores`: processes of a run that share cores, with each other and with others."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.config.run import RunConfig
from offbeat.launch.commands.main import app
from offbeat.plugins.planning.prediction import predict
from offbeat.plugins.planning.run_plan import WallSeconds, core_use
from offbeat.plugins.planning.shared_cores import CoreUse, SharedCores
from offbeat.plugins.planning.virtual_ports import Costs, GroupWork, SharedEngine
from offbeat.plugins.simulation.loop import VirtualLoop
from tests.support import shown_run

CPU: tuple[str, ...] = ("cpu/trainer_s", "cpu/controller_s", "cpu/engines_s", "cpu/workers_s")


def use(cores: float, others: float = 0.0, **changes: float) -> CoreUse:
    facts = {"slowdown": 1.0, "step_cpu_s": 2.0, "group_cpu_s": 0.0, "engine_duty": 1.0} | changes
    return CoreUse(cores, others, **facts)


def ends_s(*processes: Callable[[], Awaitable[object]]) -> list[float]:
    """When each of these ends, all begun at once."""
    loop = VirtualLoop(random.Random(0), max_events=10_000, max_s=1e6)

    async def one(process: Callable[[], Awaitable[object]]) -> float:
        await process()
        return asyncio.get_running_loop().time()

    async def all_of_them() -> list[float]:
        return list(await asyncio.gather(*map(one, processes)))

    try:
        return loop.run_until_complete(loop.create_task(all_of_them()))
    finally:
        loop.close()


def computing(cores: SharedCores, *cpu_s: float) -> list[Callable[[], Awaitable[object]]]:
    return [lambda each=each: cores.run(each) for each in cpu_s]


def test_processes_have_a_core_each_until_there_are_more_than_cores() -> None:
    assert ends_s(*computing(SharedCores(use(2)), 3.0, 5.0)) == pytest.approx([3.0, 5.0])
    # One core: both take turns for 6 s, then the longer one has it alone.
    assert ends_s(*computing(SharedCores(use(1)), 3.0, 5.0)) == pytest.approx([6.0, 8.0])


def test_processes_of_others_take_their_share() -> None:
    assert ends_s(*computing(SharedCores(use(2, others=3.0)), 4.0)) == pytest.approx([8.0])


def test_without_cores_nothing_slows_anything() -> None:
    assert ends_s(*computing(SharedCores(None), 3.0, 3.0, 3.0)) == pytest.approx([3.0] * 3)


def test_an_engine_and_a_trainer_on_one_core_take_turns() -> None:
    shared = use(1)
    cores = SharedCores(shared)
    engine = SharedEngine("generator-0", Costs(1.0, 0.0, 0, 1, 0, 0, 0, core_use=shared), cores)
    decode = lambda: engine.decode(GroupWork((4.0,)))  # noqa: E731 - beside the other
    # 6 s in turns are 3 s of the trainer and 3 of the engine, which has 1 s left.
    assert ends_s(decode, *computing(cores, 3.0)) == pytest.approx([7.0, 6.0])


def recipe(max_staleness: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "steps": 10,
            "groups_per_step": 4,
            "samples_per_group": 2,
            "model": {"path": "none"},
            "sampler": {"max_staleness": max_staleness},
            "generator": {"backend": "stub"},
            "trainer": {"backend": "stub"},
            "environment": {"name": "stub"},
        }
    )


@pytest.mark.parametrize(("cores", "gain"), [(2.0, 1.5), (1.0, 1.0)])
def test_overlap_gains_nothing_where_both_need_the_same_core(cores: float, gain: float) -> None:
    """A step trains for 2 s, and its groups are in the engine for 1 s."""
    costs = Costs(1.0, 0.0, 2.0, 4, 0.0, 0.0, 0.0, core_use=use(cores))
    work = [GroupWork((1.0,), response_tokens=10)]
    synchronous, overlapped = (predict(recipe(bound), costs, work) for bound in (0, 2))
    assert synchronous.step_s / overlapped.step_s == pytest.approx(gain, rel=0.03)


def test_who_else_computes_follows_from_what_the_trainer_took_beyond_its_cpu_seconds() -> None:
    cpu_s: dict[str, float] = dict(zip(CPU, (1.0, 0.25, 1.0, 0.25), strict=True))
    found = core_use(2.0, cpu_s, WallSeconds(step=6.0, compute=4.0, engines=5.0), groups=5)
    # At a pace of 1/4, 8 processes share 2 cores: the trainer, one that is the rest of the run, and 6.
    assert found == use(2.0, 6.0, slowdown=4.0, step_cpu_s=1.25, group_cpu_s=0.05, engine_duty=0.8)
    alone = core_use(2.0, cpu_s, WallSeconds(step=6.0, compute=1.0, engines=5.0), groups=5)
    assert (alone.others, alone.slowdown) == (0.0, 1.0)


def run_of(directory: Path, trainer: str) -> Path:
    generator = {"torch": "embedded", "stub": "stub"}[trainer]
    made = {"generator": {"backend": generator}, "trainer": {"backend": trainer}}
    made |= {"groups_per_step": 8, "samples_per_group": 8, "environment": {"name": "stub"}}
    return shown_run.finished(directory / trainer, 20, recipe=made)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose records have CPU seconds."""
    made = run_of(tmp_path_factory.mktemp("cores"), "torch")
    path = made / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    with_cpu = [record | dict.fromkeys(CPU, 0.01) for record in records]
    path.write_text("".join(json.dumps(record) + "\n" for record in with_cpu))
    return made


def planned(run: Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", str(run), "sampler.max_staleness=0", *arguments])
    return done.exit_code, done.output


def test_a_plan_says_how_many_others_shared_the_cores(run_dir: Path) -> None:
    code, text = planned(run_dir, "--cores", "2", "--others", "0")
    assert code == 0, text
    assert "other processes had shared 2 cores" in text
    named = [line.split("  ")[0] for line in text.splitlines() if " others 0" in f" {line}"]
    assert named == ["others 0", "sampler.max_staleness=0 others 0"], "the run itself comes first"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cores", "0"], "--cores 0 is not a number of cores"),
        (["--others", "1"], "--others 1 says nothing without --cores"),
        (["--cores", "2", "--others", "-1"], "--others -1 is not a number of processes"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    run_dir: Path, arguments: list[str], said: str
) -> None:
    code, text = planned(run_dir, *arguments)
    assert code == 2
    assert said in text


def test_a_run_without_cpu_seconds_or_on_other_devices_is_refused(tmp_path: Path) -> None:
    code, text = planned(run_of(tmp_path, "torch"), "--cores", "2")
    assert (code, "--cores needs cpu/trainer_s" in text) == (2, True), text
    code, text = planned(run_of(tmp_path, "stub"), "--cores", "2")
    assert (code, "do not compute on the CPU" in text) == (2, True), text

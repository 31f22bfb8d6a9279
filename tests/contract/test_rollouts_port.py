"""Every implementation of the rollouts' port keeps the contract."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import ray
from in_process import InProcessGenerator, InProcessRollouts, InProcessWorker
from local_loop import rollouts_loop
from rollouts_contract import FENCE, QUICK, SLOW, Bench, Play, RolloutsContract, Story
from simulated import simulate

from offbeat.actors.call import Handle
from offbeat.actors.engine_actor import StubEngineActor
from offbeat.actors.ray_ports import RayGenerator, RayRollouts
from offbeat.actors.ray_worker import LIVENESS
from offbeat.config.mixture import sampling_identity
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import StubConfig
from offbeat.controller.failpoints import Failpoint
from offbeat.fakes.engine_server import StubEngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.local.hosted import Hosted
from offbeat.local.parts import make_worker
from offbeat.local.ports import LocalGenerator, LocalRollouts
from offbeat.local.threads import LoopThread
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.groups import RolloutTask
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.controller_ports import (
    Caller,
    SimulatedGenerator,
    SimulatedRollouts,
)
from offbeat.plugins.simulation.engine import FakeEngine
from offbeat.plugins.simulation.schedule import PlannedFault
from offbeat.plugins.simulation.worker import FakeWorker
from offbeat.rollouts.worker import EnvironmentSpec
from tests.support.fakes import FakeGenerator, FakeRollouts
from tests.support.renewed_actors import RenewedEngine, RenewedWorker, SharedActors
from tests.support.virtual_time import run

CONFIG = RunConfig.model_validate(
    {
        "steps": 1,
        "model": {"path": "none"},
        "environment": {"name": "stub"},
        "generator": {"max_model_len": 64, "sampling": {"max_new_tokens": 8}},
        "stub": {"median_rollout_s": 0.02, "tail_sigma": 0.5, "sync_s": 0.01},
    }
)
NEVER_S = 1e6


# --- the fake of the unit tests -------------------------------------------------------------------


class FakeBench(Bench):
    rollouts: FakeRollouts

    def endless(self, prompt_index: int, attempt: int = 1) -> RolloutTask:
        self.rollouts.slow[prompt_index] = NEVER_S
        return super().endless(prompt_index, attempt)

    def impossible(self, prompt_index: int) -> RolloutTask:
        nan = RolloutFailed(FailureKind.DATA, prompt_index, 1, "reward_nan", "reward is nan")
        self.rollouts.faults[prompt_index] = [nan]
        return self.task(prompt_index)

    async def running(self) -> int:
        return self.rollouts.running


def play_on_fake(story: Story) -> None:
    async def main() -> None:
        engines = {name: FakeGenerator(name) for name in (QUICK, SLOW)}
        bench = FakeBench(FakeRollouts(engines), engines)
        await bench.serve()
        await story(bench)

    run(main())


# --- the simulator's ------------------------------------------------------------------------------


class SimulatedBench(Bench):
    def __init__(self, context: SimulationContext, caller: Caller) -> None:
        engines = {name: FakeEngine(name, context) for name in (QUICK, SLOW)}
        engines[SLOW].wedge()
        workers = [FakeWorker("environment-0", context, engines)]
        super().__init__(
            SimulatedRollouts(caller, workers, lambda: (0, 0)),
            {name: SimulatedGenerator(caller, engine) for name, engine in engines.items()},
        )
        self._faults = context.faults

    def impossible(self, prompt_index: int) -> RolloutTask:
        self._faults.failpoint(Failpoint.DISPATCHED)
        return self.task(prompt_index)


def play_in_simulation(story: Story) -> None:
    async def main(context: SimulationContext, caller: Caller) -> None:
        bench = SimulatedBench(context, caller)
        await bench.serve()
        await story(bench)

    simulate(CONFIG, main, PlannedFault("reward_raises", failpoint=Failpoint.DISPATCHED))


# --- real actors ----------------------------------------------------------------------------------


class RealBench(Bench):
    sampling = sampling_identity(CONFIG)

    def impossible(self, prompt_index: int) -> RolloutTask:
        task = self.task(prompt_index)
        long = msgspec.structs.replace(task.prompt, data={"text": "too long" * 100})
        return msgspec.structs.replace(task, prompt=long)


def engine_in(run_dir: Path, name: str) -> EngineSpec:
    slow = StubConfig(median_rollout_s=NEVER_S, tail_sigma=0, sync_s=0)
    return EngineSpec(
        name=name,
        model=CONFIG.model,
        generator=CONFIG.generator,
        stub=slow if name == SLOW else CONFIG.stub,
        seed=0,
        run_dir=str(run_dir),
    )


def worker_in(run_dir: Path, engines: dict[str, str]) -> EnvironmentSpec:
    """Of engines by the names under which Ray knows them."""
    folder = str(run_dir)
    return EnvironmentSpec("environment-0", CONFIG, folder, folder, engines)


def play_in_process(run_dir: Path) -> Callable[[Story], None]:
    def engine(name: str) -> InProcessGenerator:
        return InProcessGenerator(name, lambda: StubEngineActor(engine_in(run_dir, name)))

    def play(story: Story) -> None:
        async def main() -> None:
            engines = {name: engine(name) for name in (QUICK, SLOW)}
            rollouts = InProcessRollouts(InProcessWorker(worker_in(run_dir, {}), engines))
            bench = RealBench(rollouts, engines)
            await bench.serve()
            await story(bench)
            await rollouts.close()

        asyncio.run(main())

    return play


def play_locally(run_dir: Path) -> Callable[[Story], None]:
    def engine(name: str, loop: LoopThread) -> LocalGenerator:
        spec = engine_in(run_dir, name)
        return LocalGenerator(Hosted(name, lambda _: StubEngineServer(spec)), loop)

    def play(story: Story) -> None:
        async def main(loop: LoopThread) -> None:
            engines = {name: engine(name, loop) for name in (QUICK, SLOW)}
            worker = Hosted("environment-0", partial(make_worker, worker_in(run_dir, {}), engines))
            rollouts = LocalRollouts(worker, loop, lambda _: None)
            bench = RealBench(rollouts, engines)
            await bench.serve()
            await story(bench)
            await rollouts.close()
            for each in engines.values():
                await each.close()

        with rollouts_loop() as loop:
            asyncio.run(main(loop))

    return play


def actors_in(run_dir: Path, number: int) -> list[Handle]:
    """Start a worker and its engines."""
    known = {name: f"{run_dir.name}/{number}/{name}" for name in (QUICK, SLOW)}
    worker = ray.remote(concurrency_groups={LIVENESS: 1})(RenewedWorker)  # pyright: ignore[reportCallIssue] -- Ray declares no such option
    engine = ray.remote(RenewedEngine)
    options = {"num_cpus": 0, "max_restarts": -1}
    return [
        worker.options(**options).remote(worker_in(run_dir / "worker", known)),
        *(
            engine.options(name=known[name], **options).remote(engine_in(run_dir / name, name))
            for name in known
        ),
    ]


def play_over_ray(worker: Handle, engines: Sequence[Handle]) -> Callable[[Story], None]:
    def play(story: Story) -> None:
        async def main() -> None:
            rollouts = RayRollouts([worker])
            named = zip((QUICK, SLOW), engines, strict=True)
            generators = {name: RayGenerator(name, handle) for name, handle in named}
            bench = RealBench(rollouts, generators)
            await bench.serve()
            await story(bench)
            await rollouts.close()

        asyncio.run(main())

    return play


# --- the contract ---------------------------------------------------------------------------------


def test_columns_that_logs_and_trainer_share_in_one_process_are_read_only(tmp_path: Path) -> None:
    async def story(on: Bench) -> None:
        _, payload = await on.rollouts.rollout(FENCE, on.task(0))
        assert payload.columns
        assert not any(column.flags.writeable for column in payload.columns.values())

    play_locally(tmp_path)(story)


class TestRollouts(RolloutsContract):
    @pytest.fixture(params=["fake", "simulated"])
    def play(self, request: pytest.FixtureRequest) -> Play:
        return play_on_fake if request.param == "fake" else play_in_simulation


class TestRolloutsInProcess(RolloutsContract):
    @pytest.fixture(params=["actors", "local"])
    def play(self, request: pytest.FixtureRequest, tmp_path: Path) -> Play:
        return play_in_process(tmp_path) if request.param == "actors" else play_locally(tmp_path)


@pytest.fixture(scope="module")
def actors(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedActors]:
    actors = SharedActors(partial(actors_in, tmp_path_factory.mktemp("rollouts")))
    yield actors
    actors.kill()


@pytest.mark.ray
@pytest.mark.timeout(180)
class TestRolloutsOverRay(RolloutsContract):
    @pytest.fixture
    def play(self, actors: SharedActors) -> Play:
        worker, *engines = actors.renewed()
        return play_over_ray(worker, engines)

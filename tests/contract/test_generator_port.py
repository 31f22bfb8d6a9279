"""Every implementation of the generator's port keeps the contract."""

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest
import ray
import torch
import xxhash
from generator_contract import Bench, GeneratorContract, HoldingBench, Play, Story
from in_process import InProcessGenerator
from local_loop import rollouts_loop
from simulated import simulate
from transformers import AutoModelForCausalLM

from offbeat.actors.call import Handle
from offbeat.actors.engine_actor import StubEngineActor
from offbeat.actors.ray_ports import RayGenerator
from offbeat.config.run import RunConfig
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.ports import Generator
from offbeat.generators.spec import EngineSpec
from offbeat.local.hosted import Hosted
from offbeat.local.ports import LocalGenerator
from offbeat.local.threads import LoopThread, WorkThread
from offbeat.messages.weights import WeightRelease, WeightsAck
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.controller_ports import Caller, SimulatedGenerator
from offbeat.plugins.simulation.engine import FakeEngine
from offbeat.plugins.simulation.schedule import PlannedFault
from offbeat.weight_sync.manifest import release_digest
from tests.support.fakes import FakeGenerator
from tests.support.holding_engines import HoldingEmbedded, HoldingServer
from tests.support.plain_modules import ModuleSource
from tests.support.release_parts import filled_release
from tests.support.renewed_actors import RenewedHoldingEngine, SharedActors
from tests.support.virtual_time import run

TINY = Path(__file__).parents[2] / "models" / "tiny-addition"
SYNC_S = 0.3
CONFIG = RunConfig.model_validate(
    {"steps": 1, "model": {"path": str(TINY)}, "stub": {"sync_s": SYNC_S}}
)
NAME = "generator-0"


def named(version: int) -> WeightRelease:
    """A release without content."""
    return WeightRelease(version, f"digest-{version}", None, (), 10)


# --- halfway through a transfer -------------------------------------------------------------------


class VirtualBench(Bench):
    """An engine on a virtual clock, where half of a transfer's time is exactly that."""

    async def half_sent(self, epoch: int, version: int) -> asyncio.Future[WeightsAck]:
        transfer = asyncio.ensure_future(self.load(epoch, version))
        await asyncio.sleep(SYNC_S / 2)
        return transfer


# --- the fake of the unit tests -------------------------------------------------------------------


class FakeBench(VirtualBench):
    generator: FakeGenerator

    def release(self, version: int) -> WeightRelease:
        return named(version)

    def torn(self, version: int) -> WeightRelease:
        self.generator.refuse_loads = 1
        return named(version)


def play_on_fake(story: Story) -> None:
    async def main() -> None:
        generator = FakeGenerator(NAME)
        generator.load_s = SYNC_S
        await story(FakeBench(generator))

    run(main())


# --- the simulator's ------------------------------------------------------------------------------

TORN = PlannedFault("load_torn", NAME, failpoint=Failpoint.PUBLISHED)
TORN_AGAIN = msgspec.structs.replace(TORN, nth=2)


class SimulatedBench(VirtualBench):
    def __init__(self, context: SimulationContext, caller: Caller) -> None:
        super().__init__(SimulatedGenerator(caller, FakeEngine(NAME, context)))
        self._faults = context.faults

    def release(self, version: int) -> WeightRelease:
        return named(version)

    def torn(self, version: int) -> WeightRelease:
        self._faults.failpoint(Failpoint.PUBLISHED)
        return named(version)


def play_in_simulation(story: Story) -> None:
    async def main(context: SimulationContext, caller: Caller) -> None:
        await story(SimulatedBench(context, caller))

    simulate(CONFIG, main, TORN, TORN_AGAIN)


# --- real actors ----------------------------------------------------------------------------------


def spec_in(run_dir: Path) -> EngineSpec:
    return EngineSpec(
        name=NAME,
        model=CONFIG.model,
        generator=CONFIG.generator,
        stub=CONFIG.stub,
        seed=0,
        run_dir=str(run_dir),
    )


class StubBench(Bench):
    def release(self, version: int) -> WeightRelease:
        return filled_release(version, version)

    def torn(self, version: int) -> WeightRelease:
        del version
        pytest.skip("a stub engine takes whatever it is sent")


class InProcessStubBench(StubBench, VirtualBench): ...


class RayBench(StubBench):
    def __init__(self, generator: Generator, engine: Handle) -> None:
        super().__init__(generator)
        self._engine = engine

    async def half_sent(self, epoch: int, version: int) -> asyncio.Future[WeightsAck]:
        await self._engine.hold.remote()
        transfer = asyncio.ensure_future(self.load(epoch, version))
        await self._engine.until_held.remote()
        return transfer


def play_on_stub(run_dir: Path) -> Callable[[Story], None]:
    def play(story: Story) -> None:
        async def main() -> None:
            engine = InProcessGenerator(NAME, lambda: StubEngineActor(spec_in(run_dir)))
            await story(InProcessStubBench(engine))
            await engine.close()

        run(main())

    return play


@cache
def source() -> ModuleSource:
    model = AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype=torch.float32)
    return ModuleSource(model, chunk_bytes=200_000)


class EmbeddedBench(HoldingBench):
    def release(self, version: int) -> WeightRelease:
        """The model of the repository, its last weights flipped a bit differently a version."""
        manifest = source().manifest
        chunks = [chunk.copy() for chunk, _ in source().chunks()]
        chunks[-1][0] ^= version
        digest = release_digest(manifest, [xxhash.xxh3_128_hexdigest(each.data) for each in chunks])
        return WeightRelease(version, digest, manifest, tuple(chunks), manifest.nbytes)


def play_on_embedded(run_dir: Path) -> Callable[[Story], None]:
    def play(story: Story) -> None:
        async def main() -> None:
            engine = InProcessGenerator(NAME, lambda: HoldingEmbedded(spec_in(run_dir)))
            try:
                await story(EmbeddedBench(engine))
            finally:
                await engine.close()

        asyncio.run(main())

    return play


class LocalBench(EmbeddedBench):
    """An engine of the local runtime, whose calls run on another loop."""

    def __init__(self, generator: Generator, made: list[HoldingServer], loop: LoopThread) -> None:
        super().__init__(generator)
        self._made, self._loop = made, loop

    async def half_sent(self, epoch: int, version: int) -> asyncio.Future[WeightsAck]:
        engine = self._made[-1]
        await self._loop.call(engine.hold)
        transfer = asyncio.ensure_future(self.load(epoch, version))
        await self._loop.call(engine.until_held)
        return transfer


def play_locally(run_dir: Path) -> Callable[[Story], None]:
    def play(story: Story) -> None:
        made = list[HoldingServer]()

        def make(thread: WorkThread) -> HoldingServer:
            made.append(HoldingServer(spec_in(run_dir), steps_in=thread))
            return made[-1]

        async def main(loop: LoopThread) -> None:
            generator = LocalGenerator(Hosted(NAME, make), loop)
            try:
                await story(LocalBench(generator, made, loop))
            finally:
                await generator.close()

        with rollouts_loop() as loop:
            asyncio.run(main(loop))

    return play


def play_over_ray(engine: Handle) -> Callable[[Story], None]:
    def play(story: Story) -> None:
        async def main() -> None:
            await story(RayBench(RayGenerator(NAME, engine), engine))

        asyncio.run(main())

    return play


# --- the contract ---------------------------------------------------------------------------------


class TestGenerators(GeneratorContract):
    @pytest.fixture(params=["fake", "simulated", "stub", "embedded", "local"])
    def play(self, request: pytest.FixtureRequest, tmp_path: Path) -> Play:
        match request.param:
            case "fake":
                return play_on_fake
            case "simulated":
                return play_in_simulation
            case "stub":
                return play_on_stub(tmp_path)
            case "local":
                return play_locally(tmp_path)
            case _:
                return play_on_embedded(tmp_path)


@pytest.fixture(scope="module")
def engines(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedActors]:
    actor = ray.remote(RenewedHoldingEngine).options(num_cpus=0, max_restarts=-1)
    run_dir = tmp_path_factory.mktemp("engine")
    engines = SharedActors(lambda _: [actor.remote(spec_in(run_dir))])
    yield engines
    engines.kill()


@pytest.mark.ray
@pytest.mark.timeout(180)
class TestGeneratorOverRay(GeneratorContract):
    @pytest.fixture
    def play(self, engines: SharedActors) -> Play:
        (engine,) = engines.renewed()
        return play_over_ray(engine)

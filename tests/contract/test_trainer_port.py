"""Every implementation of the trainer's port keeps the contract."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from in_process import InProcessTrainer
from simulated import simulate
from trainer_bench import Bench, Play, Story
from trainer_contract import TrainerContract

from offbeat.actors.call import Handle
from offbeat.actors.ray_ports import PayloadHandle
from offbeat.actors.ray_trainer import RayTrainer
from offbeat.actors.trainer_actor import StubTrainerActor, TorchTrainerActor
from offbeat.config.run import RunConfig
from offbeat.controller.failpoints import Failpoint
from offbeat.local.hosted import Hosted
from offbeat.local.parts import CpuClocks, make_rank
from offbeat.local.ports import LocalTrainer, Payload
from offbeat.messages.training import Chunk
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.controller_ports import Caller, SimulatedTrainer
from offbeat.plugins.simulation.disk import SimulatedPayload
from offbeat.plugins.simulation.schedule import PlannedFault
from offbeat.plugins.simulation.trainer import FakeTrainer as SimulatedGang
from offbeat.trainers.spec import TrainerSpec
from offbeat.transfer_queue.schema import Columns
from tests.support.fakes import FakeTrainer
from tests.support.renewed_actors import RenewedTrainer, SharedActors
from tests.support.virtual_time import run

TINY = Path(__file__).parents[2] / "models" / "tiny-addition"
CONFIG = RunConfig.model_validate(
    {
        "steps": 10,
        "groups_per_step": 4,
        "model": {"path": str(TINY)},
        "trainer": {"threads": 1, "optimizer": {"learning_rate": 1e-3}},
        "stub": {"step_s": 0.0},
    }
)

ON_STUB = RunConfig.model_validate(
    {**CONFIG.model_dump(exclude={"trainer"}), "trainer": {"backend": "stub"}}
)


# --- the fake of the unit tests -------------------------------------------------------------------


class FakeBench(Bench):
    trainer: FakeTrainer

    def chunk(self, *prompt_indices: int) -> Chunk:
        return Chunk(prompt_indices, tuple((object(),) for _ in prompt_indices))

    def unreadable(self, *prompt_indices: int) -> Chunk:
        self.trainer.fail_at = {len(self.trainer.steps) + 1: ["microbatch"]}
        return self.chunk(*prompt_indices)

    def worthless(self, *prompt_indices: int) -> Chunk:
        self.trainer.refuse_steps = {len(self.trainer.steps) + 1}
        return self.chunk(*prompt_indices)


def play_on_fake(story: Story) -> None:
    async def main() -> None:
        await story(FakeBench(FakeTrainer()))

    run(main())


# --- the simulator's ------------------------------------------------------------------------------

NEVER_HEARD_OF = 0  # incarnation of a controller whose payloads are gone


class SimulatedBench(Bench):
    def __init__(self, context: SimulationContext, caller: Caller, gang: SimulatedGang) -> None:
        super().__init__(SimulatedTrainer(caller, gang))
        context.lost_controllers.add(NEVER_HEARD_OF)
        self._faults = context.faults

    def chunk(self, *prompt_indices: int, incarnation: int = 1) -> Chunk:
        payloads = [
            (SimulatedPayload(each, 1, incarnation, each * 7, 0, 0, ""),) for each in prompt_indices
        ]
        return Chunk(prompt_indices, tuple(payloads), ((-0.5, 0.5),) * len(payloads))

    def unreadable(self, *prompt_indices: int) -> Chunk:
        return self.chunk(*prompt_indices, incarnation=NEVER_HEARD_OF)

    def worthless(self, *prompt_indices: int) -> Chunk:
        self._faults.failpoint(Failpoint.CLAIMED)
        return self.chunk(*prompt_indices)


def play_in_simulation(story: Story) -> None:
    async def main(context: SimulationContext, caller: Caller) -> None:
        await story(SimulatedBench(context, caller, SimulatedGang(context, 4)))

    simulate(CONFIG, main, PlannedFault("gradient_nan", "trainer", failpoint=Failpoint.CLAIMED))


# --- real actors ----------------------------------------------------------------------------------


def columns(prompt_index: int, *, valid: bool = True) -> Columns:
    """A group of two samples."""
    dice = np.random.default_rng(prompt_index)
    return {
        "prompt_ids": dice.integers(3, 60, 3, dtype=np.int32),
        "response_ids": dice.integers(3, 60, 5, dtype=np.int32),
        "response_offsets": np.array([0, 2, 5], np.int64),
        "loss_mask": np.full(5, valid),
        "generation_logprobs": -1 - dice.random(5, np.float32),
        "weight_versions": np.zeros(5, np.int32),
        "rewards": np.array([1, 0], np.float32),
    }


def without_tokens(prompt_index: int) -> Columns:
    return {name: each for name, each in columns(prompt_index).items() if name != "response_ids"}


class RealBench(Bench):
    def chunk(self, *prompt_indices: int) -> Chunk:
        return self._chunk(prompt_indices, [columns(each) for each in prompt_indices])

    def unreadable(self, *prompt_indices: int) -> Chunk:
        return self._chunk(prompt_indices, [without_tokens(each) for each in prompt_indices])

    def worthless(self, *prompt_indices: int) -> Chunk:
        return self._chunk(prompt_indices, [columns(each, valid=False) for each in prompt_indices])

    def _chunk(self, prompt_indices: tuple[int, ...], groups: list[Columns]) -> Chunk:
        payloads = tuple((handle,) for handle in self._handles(groups))
        return Chunk(prompt_indices, payloads, ((0.5, -0.5),) * len(groups), 8 * len(groups))

    def _handles(self, groups: list[Columns]) -> list[Any]:
        return list(groups)


def play_in_process(
    actor: type[StubTrainerActor | TorchTrainerActor], run_dir: Path
) -> Callable[[Story], None]:
    def play(story: Story) -> None:
        async def main() -> None:
            trainer = InProcessTrainer(lambda: actor(TrainerSpec(CONFIG, str(run_dir))))
            try:
                await story(RealBench(trainer))
            finally:
                await trainer.close()

        asyncio.run(main())

    return play


class LocalBench(RealBench):
    def _handles(self, groups: list[Columns]) -> list[Any]:
        return [Payload(each) for each in groups]


def play_locally(run_dir: Path, config: RunConfig) -> Callable[[Story], None]:
    def play(story: Story) -> None:
        async def main() -> None:
            spec = TrainerSpec(config, str(run_dir))
            trainer = LocalTrainer(Hosted("trainer-rank0", partial(make_rank, spec, CpuClocks())))
            try:
                await story(LocalBench(trainer))
            finally:
                await trainer.close()

        asyncio.run(main())

    return play


class RayBench(RealBench):
    def _handles(self, groups: list[Columns]) -> list[Any]:
        ref = ray.put(groups)
        return [PayloadHandle(ref, index) for index in range(len(groups))]


def play_over_ray(rank: Handle) -> Callable[[Story], None]:
    def play(story: Story) -> None:
        async def main() -> None:
            bench = RayBench(RayTrainer([rank]))
            await bench.up()
            await story(bench)

        asyncio.run(main())

    return play


# --- the contract ---------------------------------------------------------------------------------


class TestTrainers(TrainerContract):
    @pytest.fixture(params=["fake", "simulated", "stub", "torch", "local stub", "local torch"])
    def play(self, request: pytest.FixtureRequest, tmp_path: Path) -> Play:
        match request.param:
            case "fake":
                return play_on_fake
            case "simulated":
                return play_in_simulation
            case "stub":
                return play_in_process(StubTrainerActor, tmp_path)
            case "local stub":
                return play_locally(tmp_path, ON_STUB)
            case "local torch":
                return play_locally(tmp_path, CONFIG)
            case _:
                return play_in_process(TorchTrainerActor, tmp_path)


@pytest.fixture(scope="module")
def ranks(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedActors]:
    actor = ray.remote(RenewedTrainer).options(num_cpus=0, max_restarts=-1)
    spec = TrainerSpec(CONFIG, str(tmp_path_factory.mktemp("rank")))
    ranks = SharedActors(lambda _: [actor.remote(spec)])
    yield ranks
    ranks.kill()


@pytest.mark.ray
@pytest.mark.timeout(180)
class TestTrainerOverRay(TrainerContract):
    @pytest.fixture
    def play(self, ranks: SharedActors) -> Play:
        (rank,) = ranks.renewed()
        return play_over_ray(rank)

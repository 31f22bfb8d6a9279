"""ARCHITECTURE.md names every file that hands one prompt group on, as executed code shows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from following import Follower
from in_process import InProcessGenerator, InProcessRollouts, InProcessTrainer, InProcessWorker
from tensordict import TensorDict, TensorDictBase

from offbeat.actors.engine_actor import StubEngineActor
from offbeat.config.run import RunConfig
from offbeat.fakes.trainer import StubSource, StubTrainer
from offbeat.generators.spec import EngineSpec
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.training import ChunkResult
from offbeat.rollouts.worker import EnvironmentSpec
from offbeat.run_files.sharing import WriteLocation
from offbeat.trainers.backend import Advantages, TrainerBackend
from offbeat.trainers.rank import TrainerRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.transfer_queue.schema import RESPONSE_IDS, Columns
from tests.support.architecture import traced
from tests.support.no_address import no_address
from tests.support.virtual_time import run
from tests.support.world import World

ROOMS: Final = ("controller", "rollouts", "trainers", "transfer_queue", "actors")
FOLLOWED: Final = 5
"""Prompt index of the group that is followed; it is trained in the second step."""

DRY: Final[dict[str, Any]] = {
    "steps": 3,
    "environment": {"name": "stub"},
    "generator": {"max_model_len": 64, "sampling": {"max_new_tokens": 8}},
    "stub": {"median_rollout_s": 0.02, "tail_sigma": 0.5, "sync_s": 0.01},
    "trainer": {"backend": "stub"},
}


class Group:
    """Recognises the group: its prompt index, an object with that index, or its columns."""

    columns: Columns | None = None

    def __call__(self, name: str, value: Any) -> bool:
        if name == "prompt_index":
            return value == FOLLOWED
        several = value if name == "prompt_indices" else getattr(value, "prompt_indices", ())
        if isinstance(several, list | tuple | set | dict) and FOLLOWED in several:
            return True
        is_columns = self.columns is not None and value is self.columns
        return is_columns or getattr(value, "prompt_index", None) == FOLLOWED


class RecordingRollouts(InProcessRollouts):
    """Rollouts that tell which columns are those of the group."""

    group: Group

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Columns]:
        receipt, columns = await super().rollout(fence, task)
        if task.prompt_index == FOLLOWED:
            self.group.columns = columns
        return receipt, columns


class RecordingTrainer(StubTrainer):
    """A stub trainer that keeps the chunks it trains, and makes them as a real one does."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config.stub, groups_per_step=config.groups_per_step)
        self.chunks = list[TensorDictBase]()

    def make_chunk(self, groups: Sequence[Columns]) -> TensorDictBase:
        return TrainerBackend.make_chunk(self, groups)

    def train_microbatch(
        self,
        key: StepKey,
        chunk: TensorDictBase,
        advantages: Advantages,
        minibatches: Sequence[int] = (),
    ) -> ChunkResult:
        self.chunks.append(chunk)
        return super().train_microbatch(key, chunk, advantages, minibatches)


def dry_world(folder: str, group: Group, trainer: RecordingTrainer | None = None) -> World:
    """The processes of a dry run in this one, without Ray."""
    world: Any = World(DRY)
    config: RunConfig = world.config

    def engine(name: str) -> InProcessGenerator:
        spec = EngineSpec(
            name=name,
            model=config.model,
            generator=config.generator,
            stub=config.stub,
            seed=0,
            run_dir=folder,
        )
        return InProcessGenerator(name, lambda: StubEngineActor(spec))

    worker = EnvironmentSpec("environment-0", config, folder, folder, {})
    world.generators = {name: engine(name) for name in world.generators}
    world.rollouts = RecordingRollouts(InProcessWorker(worker, world.generators))
    world.rollouts.group = group
    trained = trainer or RecordingTrainer(config)
    spec, place = TrainerSpec(config, folder), WriteLocation(Path(folder))
    made = trained, StubSource(trained)
    world.trainer = InProcessTrainer(lambda: TrainerRank(spec, lambda _: made, place, no_address))
    return world


@pytest.fixture(scope="module")
def handovers(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    group = Group()
    follower = Follower(group)

    async def main() -> None:
        world = dry_world(str(tmp_path_factory.mktemp("run")), group)
        with follower.following():
            await world.go()
        trained = world.built.state.ledger.trainer_version
        assert trained == DRY["steps"]

    run(main())
    assert group.columns is not None, "the group was rolled out"
    return follower.handovers


def test_each_file_that_hands_the_group_on_is_in_the_architecture(
    handovers: set[tuple[str, str]],
) -> None:
    listed = {file for file, _ in traced("One prompt group")}
    handing_on = {giver for giver, _ in handovers if giver.split("/")[0] in ROOMS}
    assert sorted(handing_on - listed) == [], "add a row to ARCHITECTURE.md, or take the file out"


def test_the_group_is_followed_from_its_admission_into_the_trainer(
    handovers: set[tuple[str, str]],
) -> None:
    for giver, taker in (
        ("controller/rollouts.py", "controller/ledger.py"),
        ("actors/call_batching.py", "rollouts/worker.py"),
        ("rollouts/worker.py", "rollouts/deadline.py"),
        ("rollouts/single_turn.py", "rollouts/columns.py"),
        ("controller/rollouts.py", "transfer_queue/index.py"),
        ("controller/train_step.py", "controller/ledger.py"),
        ("trainers/rank.py", "trainers/held_columns.py"),
    ):
        assert (giver, taker) in handovers


def test_the_group_enters_the_trainer_in_a_tensordict_of_views(tmp_path: Path) -> None:
    group, trainer = (
        Group(),
        RecordingTrainer(RunConfig.model_validate(DRY | {"model": {"path": "m"}})),
    )

    run(dry_world(str(tmp_path), group, trainer).go())

    assert group.columns is not None
    groups = list[TensorDictBase]()
    for chunk in trainer.chunks:
        assert isinstance(chunk, TensorDictBase) and chunk.batch_size == (len(chunk),)
        groups += chunk.unbind(0)
    address = group.columns[RESPONSE_IDS].__array_interface__["data"][0]
    (found,) = (each for each in groups if each[RESPONSE_IDS].data_ptr() == address)
    assert isinstance(found, TensorDict) and found.keys() == group.columns.keys()

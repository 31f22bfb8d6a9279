"""ARCHITECTURE.md names every file that hands one prompt group on, as executed code shows."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest
from in_process import InProcessGenerator, InProcessRollouts, InProcessTrainer, InProcessWorker

import offbeat
from offbeat.actors.environment_worker_actor import EnvironmentSpec
from offbeat.actors.stub_engine_actor import StubEngineActor
from offbeat.actors.stub_trainer_actor import StubTrainerActor
from offbeat.config.run import RunConfig
from offbeat.generators.spec import EngineSpec
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.trainers.spec import TrainerSpec
from offbeat.transfer_queue.schema import Columns
from tests.support.architecture import traced
from tests.support.virtual_time import run
from tests.support.world import World

PACKAGE: Final = Path(str(offbeat.__file__)).parent
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


class Follower:
    """Collects each handover of the group: from a function of one file to a function of another.

    A function has the group if it has the prompt index, an object with that ``prompt_index`` or with
    ``prompt_indices`` among which it is, or the columns of the group: the giver as any of its
    variables, the taker as an argument.
    """

    def __init__(self) -> None:
        self.columns: Columns | None = None
        self.handovers = set[tuple[str, str]]()
        """Names of both files, below the package."""

    @contextmanager
    def following(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (file := file_of(frame)) is None:
            return
        giver = frame.f_back
        while giver is not None and file_of(giver) is None:
            giver = giver.f_back
        if giver is None or file_of(giver) == file:
            return
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        # A coroutine is called by the one who awaits it: that one may know nothing of the group.
        if self._has_group(frame, arguments) and self._has_group(giver, giver.f_locals):
            self.handovers.add((str(file_of(giver)), file))

    def _has_group(self, frame: FrameType, names: Iterable[str]) -> bool:
        values = ((name, frame.f_locals.get(name)) for name in names if name != "self")
        return any(self._is_group(name, value) for name, value in values)

    def _is_group(self, name: str, value: Any) -> bool:
        if name == "prompt_index":
            return value == FOLLOWED
        several = value if name == "prompt_indices" else getattr(value, "prompt_indices", ())
        if isinstance(several, list | tuple | set | dict) and FOLLOWED in several:
            return True
        if isinstance(value, list | tuple):
            return any(self._is_group("", each) for each in flat(value))
        is_columns = self.columns is not None and value is self.columns
        return is_columns or getattr(value, "prompt_index", None) == FOLLOWED


def file_of(frame: FrameType) -> str | None:
    """Name of the frame's file below the package; None for other code."""
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield everything in lists and tuples, however they are nested."""
    for each in values:
        if isinstance(each, list | tuple):
            yield from flat(each)
        else:
            yield each


class RecordingRollouts(InProcessRollouts):
    """Rollouts that give the follower the columns of its group."""

    follower: Follower

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Columns]:
        receipt, columns = await super().rollout(fence, task)
        if task.prompt_index == FOLLOWED:
            self.follower.columns = columns
        return receipt, columns


def dry_world(folder: str, follower: Follower) -> World:
    """The processes of a dry run in this one, without Ray."""
    world: Any = World(DRY)
    config: RunConfig = world.config

    def engine(name: str) -> InProcessGenerator:
        spec = EngineSpec(
            name=name,
            model_path="none",
            model=config.model,
            generator=config.generator,
            stub=config.stub,
            seed=0,
            run_dir=folder,
        )
        return InProcessGenerator(name, lambda: StubEngineActor(spec))

    worker = EnvironmentSpec("environment-0", config, "none", folder, folder, {})
    world.generators = {name: engine(name) for name in world.generators}
    world.rollouts = RecordingRollouts(InProcessWorker(worker, world.generators))
    world.rollouts.follower = follower
    world.trainer = InProcessTrainer(lambda: StubTrainerActor(TrainerSpec(config, "none", folder)))
    return world


@pytest.fixture(scope="module")
def handovers(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    follower = Follower()

    async def main() -> None:
        world = dry_world(str(tmp_path_factory.mktemp("run")), follower)
        with follower.following():
            await world.go()
        trained = world.built.state.ledger.trainer_version
        assert trained == DRY["steps"]

    run(main())
    assert follower.columns is not None, "the group was rolled out"
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
        ("actors/environment_worker_actor.py", "rollouts/deadline.py"),
        ("rollouts/single_turn.py", "rollouts/columns.py"),
        ("controller/rollouts.py", "transfer_queue/index.py"),
        ("controller/train_step.py", "controller/ledger.py"),
        ("actors/trainer_actor.py", "trainers/held_columns.py"),
    ):
        assert (giver, taker) in handovers

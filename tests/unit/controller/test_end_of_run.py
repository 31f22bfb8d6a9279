"""How a run ends: at its last step, stopped, aborted, cancelled or stalled."""

import asyncio
from typing import Any

import pytest

from offbeat.controller.commands import Pause, Resume, Stop
from offbeat.controller.errors import RunAborted, RunFailed, RunStalled
from offbeat.controller.events import Checkpointed
from offbeat.controller.lifecycle import RunPhase
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import Checkpoint, StepResult
from offbeat.messages.weights import WeightRelease
from tests.support.fakes import (
    FakeTrainer,
    MemoryJournal,
)
from tests.support.virtual_time import run
from tests.support.world import World, bad_data


async def test_stop_finishes_the_step_in_progress() -> None:
    world = World()
    controller = world.controller()
    asyncio.get_running_loop().call_later(12, controller.control, Stop())
    await controller.run()
    assert 1 <= len(world.trainer.steps) < 10
    assert world.built.state.lifecycle.phase is RunPhase.FINISHED
    assert list(world.trainer.checkpoints) == [len(world.trainer.steps)], "nothing is trained twice"
    world.assert_ledger_agrees()


async def test_a_paused_run_dispatches_nothing_and_begins_no_step_until_it_is_resumed() -> None:
    world = World()
    controller = world.controller()
    loop, seen = asyncio.get_running_loop(), dict[int, tuple[int, int]]()

    def look(at: int) -> None:
        seen[at] = (len(world.trainer.steps), len(world.rollouts.started))

    loop.call_later(12, controller.control, Pause())
    for at in (30, 500):  # longer than the stall limit: an operator's pause is not a stall
        loop.call_later(at, look, at)
    loop.call_later(600, controller.control, Resume())
    await controller.run()
    assert seen[30] == seen[500]
    assert len(world.trainer.steps) == 10
    world.assert_ledger_agrees()


@pytest.mark.parametrize(("interval", "within_s"), [(0, 1), (100, 7)])
async def test_abort_ends_within_its_grace_and_closes_every_actor(
    interval: int, within_s: float
) -> None:
    """Of 10 seconds, 7 are for a step that is being finished; without checkpoints nobody waits."""
    world = World({"checkpoint": {"interval": interval}, "supervision": {"signal_grace_s": 10}})
    world.trainer.step_s = 1000
    controller = world.controller()
    asyncio.get_running_loop().call_later(50, controller.abort, "SIGTERM")
    with pytest.raises(RunFailed) as failure:
        await controller.run()
    assert isinstance(failure.value.causes[0], RunAborted)
    assert asyncio.get_running_loop().time() <= 50 + within_s
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert world.built.state.lifecycle.phase is RunPhase.ABORTED
    assert world.trainer.closed and world.rollouts.closed
    assert all(generator.closed for generator in world.generators.values())


def test_an_aborted_run_leaves_a_checkpoint_of_its_last_version() -> None:
    world = World()
    _abort_at(world, 12)
    version = world.built.state.ledger.trainer_version
    assert version and list(world.trainer.checkpoints) == [version]
    assert [each.version for each in world.events(Checkpointed)] == [version]


@pytest.mark.parametrize("finish_s", [0.5, 6.0])
def test_a_step_that_is_being_finished_when_its_run_is_aborted_is_in_the_last_checkpoint(
    finish_s: float,
) -> None:
    """Of 10 seconds of grace, 7 are for the last checkpoint."""
    world = World()

    class Finishing(FakeTrainer):
        async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
            if key.step == 3:
                world.built.abort("SIGTERM")  # and the trainer goes on
                await asyncio.sleep(finish_s)
            return await super().finish_train_step(fence, key)

    class SlowDisk(MemoryJournal):
        async def barrier(self) -> None:
            await asyncio.sleep(0.01)
            await super().barrier()

    world.trainer, world.journal = Finishing(step_s=0.5), SlowDisk()
    world.fail()
    assert len(world.trainer.steps) == 3
    assert list(world.trainer.checkpoints) == [3]
    assert [record["step"] for record in world.telemetry.records] == [1, 2, 3]


@pytest.mark.parametrize("mode", ["drain", "keep"])
def test_a_run_that_ends_while_weights_are_served_has_reported_its_last_step(mode: str) -> None:
    """With ``drain`` the trainer waits until they are."""
    world = World({"sync": {"mode": mode}})

    class Publishing(FakeTrainer):
        async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
            if version == 3:
                world.built.abort("SIGTERM")
                await asyncio.sleep(1)
            return await super().publish_weights(fence, version)

    world.trainer = Publishing()
    world.fail()
    assert world.built.state.ledger.trainer_version == 3
    assert [record["step"] for record in world.telemetry.records] == [1, 2, 3]


def test_an_aborted_run_waits_no_longer_for_a_checkpoint_than_its_grace_allows() -> None:
    world = World({"supervision": {"signal_grace_s": 20}})

    class Slow(FakeTrainer):
        async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
            await asyncio.Event().wait()
            return await super().save_checkpoint(fence, version)

    world.trainer = Slow()
    assert _abort_at(world, 12) == pytest.approx(12 + 0.7 * 20)
    assert world.trainer.closed and world.trainer.checkpoints == {}


def _abort_at(world: World, at: float) -> float:
    """When it has ended."""

    async def main() -> float:
        controller, loop = world.controller(), asyncio.get_running_loop()
        loop.call_later(at, controller.abort, "SIGTERM")
        with pytest.raises(RunFailed):
            await controller.run()
        return loop.time()

    return run(main())


async def test_a_cancel_from_outside_stays_a_cancel() -> None:
    world = World()
    task = asyncio.create_task(world.controller().run())
    await asyncio.sleep(9)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.trainer.closed
    assert world.built.state.lifecycle.phase is RunPhase.ABORTED


def test_a_stall_names_who_waits_for_what() -> None:
    world = World()

    class Stuck(FakePrompts):
        def prompt(self, prompt_index: int) -> Any:
            if prompt_index >= 6:
                world.built.state.sync.is_gate_open = False  # a planted bug: nobody opens it again
            return super().prompt(prompt_index)

    world.prompts = Stuck()
    failure = world.fail()
    assert isinstance(failure.causes[0], RunStalled)
    assert "train pump waits for ready groups" in str(failure)
    assert "rollout pump waits for room" in str(failure)


def test_the_trained_model_is_kept_at_the_end_unless_told_otherwise() -> None:
    kept, unkept = World(), World({"checkpoint": {"final": False}})
    kept.run()
    unkept.run()
    assert (kept.trainer.saved, unkept.trainer.saved) == ([10], [])


async def test_the_outcome_is_told_before_actors_are_closed() -> None:
    world = World({"trainer": {"restart_budget": 0}})
    world.trainer.lose_at_step = 2
    told = list[tuple[type[object], bool]]()
    controller = world.controller()
    with pytest.raises(RunFailed):
        await controller.run(lambda raised: told.append((type(raised), world.trainer.closed)))
    assert told == [(RunFailed, False)]
    assert world.trainer.closed


async def test_actors_are_closed_even_if_the_outcome_cannot_be_told() -> None:
    world = World()

    def full_disk(raised: BaseException | None) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        await world.controller().run(full_disk)
    assert world.trainer.closed
    assert all(generator.closed for generator in world.generators.values())


async def test_a_controller_that_a_newer_one_replaces_leaves_checkpoints_and_actors_alone() -> None:
    world = World()
    controller = world.controller()
    asyncio.get_running_loop().call_later(12, controller.abort, "its driver is silent")
    with pytest.raises(RunFailed):
        await controller.run(lambda _: True)
    assert world.built.state.ledger.trainer_version not in world.built.state.ledger.checkpoints
    assert not world.trainer.closed
    assert not any(generator.closed for generator in world.generators.values())


async def test_actors_are_closed_even_if_the_last_checkpoint_ends_in_a_bug() -> None:
    world = World()

    class Buggy(FakeTrainer):
        async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
            raise ZeroDivisionError

    world.trainer = Buggy()
    controller = world.controller()
    asyncio.get_running_loop().call_later(12, controller.abort, "SIGTERM")
    with pytest.raises(ZeroDivisionError):
        await controller.run()
    assert world.trainer.closed
    assert all(generator.closed for generator in world.generators.values())


def test_a_journal_that_hangs_at_the_start_ends_the_run_by_its_name() -> None:
    class Hung(MemoryJournal):
        async def barrier(self) -> None:
            await asyncio.Event().wait()

    world = World()
    world.journal = Hung()
    assert "beginning of incarnation 1 waited for the journal" in str(world.fail())
    assert world.trainer.closed


class ReplacedAtItsLastSave(FakeTrainer):
    """Trainer whose process is replaced, without notice, after the last step and before its save."""

    is_replaced = False

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        if version == 10 and not self.is_replaced:
            self.is_replaced = True
            self.steps.clear()
        return await super().save_checkpoint(fence, version)


def test_a_trainer_that_came_back_empty_before_the_last_save_is_restored_and_trained_again() -> (
    None
):
    world = World({"checkpoint": {"interval": 4, "final": False}})
    world.trainer = ReplacedAtItsLastSave()
    run(_to_the_end(world))
    assert 10 in world.trainer.checkpoints
    world.assert_ledger_agrees()


async def _to_the_end(world: World) -> None:
    await world.controller().run()


def test_a_run_that_ends_over_a_budget_of_rollouts_saves_its_last_version() -> None:
    world = World({"checkpoint": {"interval": 50}, "rollout": {"data_retries": 0}})
    world.rollouts.faults = {17: [bad_data(17)]}
    world.fail()
    assert list(world.trainer.checkpoints) == [world.built.state.ledger.trainer_version]

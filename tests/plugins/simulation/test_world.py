"""The fake actors, asked directly."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.messages.failures import (
    CheckpointFailed,
    PayloadLost,
    RolloutFailed,
    StaleFence,
    StepOutOfOrder,
    TrainStepFailed,
    WeightSyncFailed,
)
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.messages.training import Chunk
from offbeat.messages.weights import WeightRelease
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.controller_ports import (
    Caller,
    SimulatedGenerator,
    SimulatedRollouts,
    SimulatedTrainer,
)
from offbeat.plugins.simulation.disk import SimulatedPayload
from offbeat.plugins.simulation.engine import FakeEngine
from offbeat.plugins.simulation.faults import Faults
from offbeat.plugins.simulation.loop import VirtualLoop
from offbeat.plugins.simulation.network import SimulatedNetwork
from offbeat.plugins.simulation.processes import Process
from offbeat.plugins.simulation.records import (
    EngineServes,
    Fault,
    Generated,
    WorldRecord,
)
from offbeat.plugins.simulation.schedule import PlannedFault
from offbeat.plugins.simulation.trainer import FakeTrainer
from offbeat.plugins.simulation.worker import FakeWorker

T = TypeVar("T")
FENCE = Fence("run", 1)
CONFIG = RunConfig.model_validate(
    {
        "steps": 3,
        "groups_per_step": 4,
        "samples_per_group": 3,
        "model": {"path": "none"},
        "stub": {"median_rollout_s": 2.0, "tail_sigma": 0.1, "step_s": 1.0, "sync_s": 0.2},
    }
)


class Stage:
    """One trainer, one engine, one worker, and the ports to them."""

    def __init__(self, loop: VirtualLoop, *actions: str) -> None:
        self.loop, self.records = loop, list[WorldRecord]()
        rng = random.Random(1)
        faults = Faults(
            [PlannedFault(action, at_step=0) for action in actions],
            loop,
            lambda kind, target, detail: self.records.append(
                Fault(loop.time(), kind, target, detail)
            ),
        )
        network = SimulatedNetwork(loop, rng, faults)
        self.context = SimulationContext(CONFIG, loop, rng, faults, network, self.records)
        self.engine = FakeEngine("generator-0", self.context)
        self.actor = FakeTrainer(self.context, CONFIG.groups_per_step)
        worker = FakeWorker("environment-0", self.context, {"generator-0": self.engine})
        self.process = Process("controller")
        self.caller = Caller(self.context, self.process, FENCE)
        self.generator = SimulatedGenerator(self.caller, self.engine)
        self.trainer = SimulatedTrainer(self.caller, self.actor)
        self.rollouts = SimulatedRollouts(self.caller, [worker], lambda: (0, 0))
        faults.step(0)

    def of(self, kind: type[T]) -> list[T]:
        return [record for record in self.records if isinstance(record, kind)]

    async def load(self, version: int, epoch: int) -> None:
        release = WeightRelease(version, f"digest-{version}", None, (), 10)
        await self.generator.load_weights(FENCE, epoch, release)

    async def train(self, step: int, attempt: int, chunks: list[list[int]]) -> None:
        key = StepKey(step, attempt, 0)
        await self.trainer.begin_train_step(FENCE, key, LossSpec())
        for prompt_indices in chunks:
            key = key.next()
            payloads = tuple((SimulatedPayload(o, 1, 1, o * 7, 0, 0, ""),) for o in prompt_indices)
            advantages = ((-0.5, 0.5),) * len(payloads)
            chunk = Chunk(tuple(prompt_indices), payloads, advantages)
            await self.trainer.train_microbatch(FENCE, key, chunk)
        await self.trainer.finish_train_step(FENCE, key.next())


def play(main: Callable[[Stage], Awaitable[T]], *actions: str) -> T:
    loop = VirtualLoop(random.Random(0), max_events=10_000, max_s=1000)
    stage = Stage(loop, *actions)

    async def run() -> T:
        return await main(stage)

    try:
        return loop.run_until_complete(loop.create_task(run(), context=stage.process.context))
    finally:
        loop.close()


def task(prompt_index: int = 5, attempt: int = 1) -> RolloutTask:
    return RolloutTask(
        Prompt(prompt_index, 0, prompt_index, {}), attempt, 3, "generator-0", 99, 60.0
    )


# --- engines and workers ---------------------------------------------------------------------------


def test_a_group_that_decodes_through_a_weight_load_has_spans_of_both_versions() -> None:
    async def main(stage: Stage) -> None:
        await stage.load(1, 1)
        rollout = asyncio.ensure_future(stage.rollouts.rollout(FENCE, task()))
        await asyncio.sleep(0.7)
        await stage.load(2, 2)
        receipt, payload = await rollout
        longest = max(range(3), key=lambda sample: receipt.response_tokens[sample])
        assert [version for version, _ in receipt.version_spans[longest]] == [1, 2]
        for spans, tokens in zip(receipt.version_spans, receipt.response_tokens, strict=True):
            assert sum(count for _, count in spans) == tokens
        assert (payload.oldest, payload.newest) == (1, 2)
        assert stage.of(Generated)[0].spans == receipt.version_spans

    play(main)


def test_the_same_task_has_the_same_content_whoever_rolls_it_out() -> None:
    async def main(stage: Stage) -> None:
        await stage.load(1, 1)
        first, _ = await stage.rollouts.rollout(FENCE, task())
        again, _ = await stage.rollouts.rollout(FENCE, task(attempt=2))
        assert (first.rewards, first.response_tokens) == (again.rewards, again.response_tokens)

    play(main)


def test_an_engine_without_weights_serves_nothing() -> None:
    async def main(stage: Stage) -> None:
        with pytest.raises(RolloutFailed, match="engine_unavailable"):
            await stage.rollouts.rollout(FENCE, task())

    play(main)


def test_rollouts_of_an_engine_that_dies_fail_and_its_next_incarnation_holds_no_weights() -> None:
    async def main(stage: Stage) -> None:
        await stage.load(1, 1)
        before = await stage.generator.state(FENCE)
        stage.loop.call_later(0.5, stage.engine.die)
        with pytest.raises(RolloutFailed, match="engine_lost"):
            await stage.rollouts.rollout(FENCE, task())
        await asyncio.sleep(10)
        after = await stage.generator.state(FENCE)
        assert (before.version, after.version) == (1, None)
        assert before.incarnation != after.incarnation

    play(main)


@pytest.mark.parametrize("action", ["load_torn", "load_wrong_digest"])
def test_weights_that_do_not_verify_are_never_served(action: str) -> None:
    async def main(stage: Stage) -> None:
        with pytest.raises(WeightSyncFailed):
            await stage.load(1, 1)
        assert (await stage.generator.state(FENCE)).version is None
        await stage.load(1, 2)
        assert [record.epoch for record in stage.of(EngineServes)] == [2]

    play(main, action)


def test_a_newer_transfer_supersedes_an_older_one_and_an_older_epoch_is_refused() -> None:
    async def main(stage: Stage) -> None:
        await stage.load(1, 5)
        with pytest.raises(WeightSyncFailed, match="epoch 5"):
            await stage.load(2, 5)

    play(main)


@pytest.mark.parametrize("action", ["reward_nan", "group_short", "version_future", "attempt_wrong"])
def test_poison_is_told_by_the_worker_and_by_the_payload(action: str) -> None:
    async def main(stage: Stage) -> None:
        await stage.load(1, 1)
        _, payload = await stage.rollouts.rollout(FENCE, task())
        assert payload.poison == action == stage.of(Generated)[0].poison

    play(main, action)


def test_a_call_of_a_replaced_controller_is_refused() -> None:
    async def main(stage: Stage) -> None:
        await stage.generator.state(Fence("run", 2))
        with pytest.raises(StaleFence):
            await stage.generator.state(FENCE)

    play(main)


# --- the trainer -----------------------------------------------------------------------------------


def test_a_failed_call_leaves_a_step_that_only_an_abort_closes() -> None:
    async def main(stage: Stage) -> None:
        with pytest.raises(TrainStepFailed, match="in microbatch of step 1"):
            await stage.train(1, 1, [[1, 2]])
        with pytest.raises(StepOutOfOrder):
            await stage.trainer.finish_train_step(FENCE, StepKey(1, 1, 1))
        await stage.trainer.abort_train_step(FENCE, StepKey(1, 1, 0))
        await stage.train(1, 2, [[1, 2]])
        assert (await stage.trainer.state(FENCE)).version == 1

    play(main, "microbatch_raises")


def test_a_trainer_that_knows_nothing_of_the_run_refuses_its_next_step() -> None:
    async def main(stage: Stage) -> None:
        await stage.train(1, 1, [[1]])
        await stage.trainer.restart()
        await asyncio.sleep(10)
        with pytest.raises(StepOutOfOrder):
            await stage.train(2, 2, [[2]])

    play(main)


def test_restore_takes_the_newest_checkpoint_that_is_old_enough_and_forgets_newer_ones() -> None:
    async def main(stage: Stage) -> None:
        for step in (1, 2, 3):
            await stage.train(step, step, [[step]])
            if step > 1:
                await stage.trainer.save_checkpoint(FENCE, step)
        restored = await stage.trainer.restore(FENCE, 2)
        assert (restored.version, restored.last_step) == (2, 2)
        assert (await stage.trainer.restore(FENCE, 9)).version == 2
        assert (await stage.trainer.restore(FENCE, 1)).version == 0

    play(main)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_ones() -> None:
    async def main(stage: Stage) -> None:
        await stage.train(1, 1, [[1]])
        with pytest.raises(CheckpointFailed, match="no space"):
            await stage.trainer.save_checkpoint(FENCE, 1)
        assert (await stage.trainer.restore(FENCE, 1)).version == 0

    play(main, "checkpoint_fails")


def test_a_payload_is_gone_with_its_controller() -> None:
    async def main(stage: Stage) -> None:
        stage.context.lost_controllers.add(1)
        with pytest.raises(PayloadLost, match="groups 4 were lost"):
            await stage.train(1, 1, [[4]])

    play(main)

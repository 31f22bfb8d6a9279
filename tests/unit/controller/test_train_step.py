"""One step and its calls: what a failed attempt leaves to the next one."""

import asyncio
import threading
from collections.abc import Sequence

import msgspec
import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.controller.errors import RunFailed
from offbeat.controller.failpoints import Failpoint
from offbeat.messages.failures import TrainerCall, TrainStepFailed
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import Chunk, ChunkResult, PreparedColumns
from tests.support.broken_policies import ForgetsItsBound
from tests.support.fakes import FakeTrainer
from tests.support.virtual_time import run
from tests.support.world import World


class Untimely(FakeTrainer):
    """A microbatch fails at the very moment at which the next group comes in."""

    attempts = 3
    running: "asyncio.Future[None] | None" = None

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        if self.attempts:
            self.attempts -= 1
            self.running = asyncio.get_running_loop().create_future()
            await self.running
        return await super().train_microbatch(fence, key, chunk)

    def reached(self, point: Failpoint) -> None:
        if point is Failpoint.ANSWERED and self.running is not None:
            failure = TrainStepFailed(0, 1, TrainerCall.MICROBATCH, "out of memory")
            asyncio.get_running_loop().call_soon(self.running.set_exception, failure)
            self.running = None


def test_a_call_that_was_cancelled_before_it_was_sent_leaves_the_queue_as_it_was() -> None:
    trainer = Untimely()
    retries = {"step_retries": 3, "min_tokens_per_chunk": 1}
    world = World({"steps": 1, "trainer": retries}, trainer=trainer, reached=trainer.reached)
    world.rollouts.slow = {prompt_index: 7.3 * (prompt_index + 1) for prompt_index in range(4)}
    world.run()
    assert trainer.aborted == [1, 1, 1]
    world.assert_ledger_agrees()


class Scorer(FakeTrainer):
    """The logprobs it prepares are the version that they are of."""

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        assert all(len(payloads) == 1 for payloads in chunk.payloads)
        made = await super().prepare_logprobs(fence, chunk, loss)
        return msgspec.structs.replace(
            made, payloads=(len(self.steps),) * len(chunk.prompt_indices)
        )

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        assert all(added == [len(self.steps)] for _, *added in chunk.payloads)
        return await super().train_microbatch(fence, key, chunk)


@pytest.mark.parametrize("fault", ["finish", "microbatch"], ids=["rewound", "aborted"])
def test_policy_logprobs_are_of_the_version_that_trains_also_after_an_aborted_step(
    fault: str,
) -> None:
    checkpoints = {"checkpoint": {"interval": 3}}
    world = World(
        checkpoints, trainer=Scorer(), loss=LossSpec(ClippedPgLossConfig(old_logprobs="policy"))
    )
    world.trainer.fail_at = {step: [fault] for step in (5, 6, 7)}
    world.run()
    world.assert_ledger_agrees()
    assert len(world.trained) == 40


def test_a_group_past_the_bound_is_not_trained_though_a_policy_selects_it() -> None:
    """The bound is checked where groups are used, whatever admitted and selected them."""
    world = World()
    world.rollouts.slow = {1: 30.0}

    async def main() -> None:
        controller = world.controller()
        controller.state.sampler = ForgetsItsBound(world.config.groups_per_step, paced_by=3)
        await controller.run()

    with pytest.raises(RunFailed, match="was claimed past the staleness bound"):
        run(main())
    assert len(world.trainer.steps) < world.config.steps


def test_an_advantage_of_the_user_is_computed_beside_the_event_loop() -> None:
    threads = set[threading.Thread]()

    def advantages(rewards: tuple[float, ...], _: Sequence[bool]) -> tuple[float, ...]:
        threads.add(threading.current_thread())
        return rewards

    world = World({"steps": 2}, advantages=advantages, advantages_within_s=60.0)
    asyncio.run(world.go())
    assert threading.main_thread() not in threads
    world.assert_ledger_agrees()


def test_an_advantage_that_hangs_ends_the_run_and_is_named_with_its_groups() -> None:
    answer = threading.Event()

    def advantages(rewards: tuple[float, ...], _: Sequence[bool]) -> tuple[float, ...]:
        answer.wait()
        return rewards

    settings = {"steps": 1, "algorithm": {"advantage": "mine:hangs"}}
    world = World(settings, advantages=advantages, advantages_within_s=60.0)
    failed = world.fail()
    answer.set()
    assert failed.is_of_user_code
    assert "algorithm.advantage=mine:hangs: no answer within 60 s for the groups g-00000" in str(
        failed
    )
    assert not world.trainer.steps

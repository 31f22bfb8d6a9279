"""What ``Rollouts`` promises its controller, sentence by sentence, whoever implements the port."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping

import pytest
from incarnations import next_incarnation

from offbeat.controller.ports import Generator, Rollouts
from offbeat.controller.receipts import refusal
from offbeat.messages.failures import FailureKind, RolloutFailed, StaleFence
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.messages.weights import EngineState, WeightRelease
from offbeat.weight_sync.manifest import Manifest

FENCE = Fence("run", 1)
NEWER = Fence("run", 2)
VERSION = 3  # served by both engines
QUICK, SLOW = "generator-0", "generator-1"
SAMPLES = 3
EMPTY = Manifest((), (), "")


class Bench(ABC):
    """Workers with two engines: one is quick, requests to the other never end."""

    sampling: str = ""
    """Identity of the settings that the workers sample under."""

    def __init__(self, rollouts: Rollouts, generators: Mapping[str, Generator]) -> None:
        self.rollouts, self.generators = rollouts, generators

    @abstractmethod
    def impossible(self, prompt_index: int) -> RolloutTask:
        """A group that its worker cannot roll out, on whatever engine."""

    def task(self, prompt_index: int, attempt: int = 1, engine: str = QUICK) -> RolloutTask:
        prompt = Prompt(prompt_index, 0, prompt_index, {"text": f"what is {prompt_index}?"})
        seed, deadline_s = 99 + prompt_index, 60.0
        return RolloutTask(
            prompt, attempt, SAMPLES, engine, seed, deadline_s, sampling=self.sampling
        )

    def endless(self, prompt_index: int, attempt: int = 1) -> RolloutTask:
        return self.task(prompt_index, attempt, SLOW)

    async def running(self) -> int:
        """Endless groups that are being decoded."""
        return (await self.generators[SLOW].state(FENCE)).running

    # --- what happens around the port ------------------------------------------------------------

    async def serve(self) -> None:
        """Have the engines take weights."""
        for generator in self.generators.values():
            release = WeightRelease(VERSION, f"digest-{VERSION}", EMPTY, (), 10)
            await generator.load_weights(FENCE, 1, release)

    async def restarted(self, name: str) -> EngineState:
        """Kill an engine; the state of the next one."""
        generator = self.generators[name]
        before = (await generator.state(FENCE)).incarnation
        await generator.restart()
        return await next_incarnation(generator, FENCE, before)

    async def until_running(self, groups: int) -> None:
        async with asyncio.timeout(20):
            while await self.running() != groups:  # noqa: ASYNC110 - no engine tells us
                await asyncio.sleep(0.01)

    async def failure_of(self, task: RolloutTask) -> tuple[FailureKind, str]:
        """How this rollout fails; it says whose failure it is."""
        with pytest.raises(RolloutFailed) as failed:
            await self.rollouts.rollout(FENCE, task)
        failure = failed.value
        assert (failure.prompt_index, failure.attempt) == (task.prompt_index, task.attempt)
        return failure.kind, failure.reason


Story = Callable[[Bench], Awaitable[None]]
Play = Callable[[Story], None]


class RolloutsContract:
    """``play`` tells a story on a fresh bench whose engines serve, to its end."""

    def test_a_finished_group_comes_with_a_receipt_that_may_be_committed(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            engine = await on.generators[QUICK].state(FENCE)
            task = on.task(5, attempt=2)
            receipt, payload = await on.rollouts.rollout(FENCE, task)
            assert refusal(receipt, task, VERSION, VERSION) is None
            assert (receipt.engine, receipt.engine_incarnation) == (QUICK, engine.incarnation)
            assert receipt.columns and receipt.payload_bytes > 0
            assert all(map(int.__le__, receipt.valid_tokens, receipt.response_tokens))
            assert payload is not None

        play(story)

    def test_each_of_many_calls_gets_the_group_it_asked_for(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            tasks = [on.task(prompt_index) for prompt_index in range(12)]
            calls = [on.rollouts.rollout(FENCE, task) for task in tasks]
            for task, (receipt, _) in zip(tasks, await asyncio.gather(*calls), strict=True):
                assert refusal(receipt, task, VERSION, VERSION) is None

        play(story)

    def test_tokens_are_of_the_version_that_the_engine_serves(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            release = WeightRelease(VERSION + 1, "digest-4", EMPTY, (), 10)
            await on.generators[QUICK].load_weights(FENCE, 2, release)
            receipt, _ = await on.rollouts.rollout(FENCE, on.task(0))
            assert (receipt.oldest_version, receipt.newest_version) == (VERSION + 1, VERSION + 1)

        play(story)

    def test_a_cancelled_call_leaves_nothing_running(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            calls = [
                asyncio.ensure_future(on.rollouts.rollout(FENCE, on.endless(prompt_index)))
                for prompt_index in range(3)
            ]
            await on.until_running(3)
            calls[1].cancel()
            await on.until_running(2)
            for call in calls:
                call.cancel()
            await on.until_running(0)
            for call in calls:
                with pytest.raises(asyncio.CancelledError):
                    await call
            again = on.task(0, attempt=2)
            receipt, _ = await on.rollouts.rollout(FENCE, again)
            assert refusal(receipt, again, VERSION, VERSION) is None

        play(story)

    def test_an_engine_that_dies_under_a_group_says_nothing_about_the_group(
        self, play: Play
    ) -> None:
        async def story(on: Bench) -> None:
            async with asyncio.TaskGroup() as both:
                failing = both.create_task(on.failure_of(on.endless(1, attempt=4)))
                await on.until_running(1)
                both.create_task(on.generators[SLOW].restart())
            assert failing.result() == (FailureKind.INFRASTRUCTURE, "engine_lost")

        play(story)

    def test_an_engine_without_weights_serves_no_group(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            assert (await on.restarted(QUICK)).version is None
            failure = await on.failure_of(on.task(1))
            assert failure == (FailureKind.INFRASTRUCTURE, "engine_unavailable")

        play(story)

    def test_a_group_that_cannot_be_rolled_out_fails_by_its_data(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            kind, reason = await on.failure_of(on.impossible(7))
            assert kind is FailureKind.DATA and reason
            assert (await on.rollouts.rollout(FENCE, on.task(8)))[0].prompt_index == 8

        play(story)

    def test_once_a_newer_controller_has_spoken_the_older_is_refused(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            await on.rollouts.rollout(NEWER, on.task(0))
            with pytest.raises(StaleFence):
                await on.rollouts.rollout(FENCE, on.task(1))
            with pytest.raises(StaleFence):
                await on.rollouts.rollout(Fence("another run", 9), on.task(1))
            assert (await on.rollouts.rollout(NEWER, on.task(1)))[0].prompt_index == 1

        play(story)

    def test_what_a_replaced_controller_had_asked_for_is_given_up(self, play: Play) -> None:
        async def story(on: Bench) -> None:
            older = asyncio.ensure_future(on.rollouts.rollout(FENCE, on.endless(0)))
            await on.until_running(1)
            await on.rollouts.rollout(NEWER, on.task(1))
            await on.until_running(0)
            older.cancel()
            await asyncio.wait([older])

        play(story)

"""An environment worker as an actor, in this process."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offbeat.actors.call_batching import BatchedReply, CallBatcher
from offbeat.actors.environment_worker_actor import EnvironmentActor, EnvironmentSpec
from offbeat.config.run import RunConfig
from offbeat.environments.function_reward import FunctionReward
from offbeat.environments.killable import RewardTarget
from offbeat.environments.protocol import Environment, SingleTurn
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import Prompt, RolloutTask
from tests.support.environment_fakes import CharTokenizer, answers, task
from tests.support.own_logging import own_logging

REWARDS = Path(__file__).parents[1] / "environments"
CONFIG = RunConfig.model_validate(
    {"steps": 1, "model": {"path": "none"}, "environment": {"name": "stub"}}
)

_own_logging = pytest.fixture(autouse=True)(own_logging)


class Worker(EnvironmentActor):
    """Of an environment made here, and an engine that answers at once."""

    def __init__(self, run_dir: Path, environment: Environment) -> None:
        folder = str(run_dir)
        super().__init__(EnvironmentSpec("environment-0", CONFIG, "none", folder, folder, {}))
        self._environment = environment
        self._engines = {"engine-0": CallBatcher(exchange)}


async def exchange(
    asked: Sequence[tuple[int, GenerateRequest]], cancelled: Sequence[int]
) -> list[BatchedReply[GenerateResult]]:
    return [BatchedReply(id_, await answers("7", "hang")(request)) for id_, request in asked]


class Hanging(FunctionReward):
    """Its rewards take for ever; ``asked`` is set when one is."""

    def __init__(self) -> None:
        target = RewardTarget(
            "user_rewards:hangs", REWARDS, {}, memory_mib=2048, deadline_s=60.0, start_s=120.0
        )
        super().__init__(CharTokenizer(), target, workers=1)
        self.asked = asyncio.Event()

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        self.asked.set()
        return await super().score(task, result)


def test_a_worker_may_be_closed_while_a_reward_is_computed(tmp_path: Path) -> None:
    async def main() -> None:
        environment = Hanging()
        worker: Any = Worker(tmp_path, environment)  # Ray's marks: methods are remote to a checker
        rollout = asyncio.ensure_future(worker.exchange(Fence("run", 1), [(0, task())], []))
        asked = asyncio.ensure_future(environment.asked.wait())
        await asyncio.wait([rollout, asked], return_when=asyncio.FIRST_COMPLETED)
        assert asked.done(), rollout.result()
        await worker.close()
        assert await rollout == ((await worker.ping(), []), [])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


class Exiting(SingleTurn):
    """Exits where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _reach(self, here: str) -> None:
        if self.where == here:
            sys.exit(2)

    async def start(self) -> None:
        self._reach("start")

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        self._reach("encode")
        return (1,)

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        self._reach("score")
        await asyncio.gather(self._in_a_task())
        return [1.0] * task.samples

    async def _in_a_task(self) -> None:
        self._reach("a task of its own")


@pytest.mark.parametrize("where", ["start", "encode", "score", "a task of its own"])
def test_an_environment_that_exits_fails_its_group_by_name_and_the_worker_goes_on(
    tmp_path: Path, where: str
) -> None:
    async def main() -> None:
        environment = Exiting(where)
        worker: Any = Worker(tmp_path, environment)
        (_, (reply,)), _ = await worker.exchange(Fence("run", 1), [(0, task())], [])
        assert "SystemExit: 2" in str(reply.failure)
        environment.where = "nowhere"
        if where != "start":
            (_, (reply,)), _ = await worker.exchange(Fence("run", 1), [(1, task())], [])
            assert reply.failure is None
        await worker.close()

    asyncio.run(main())

"""An environment worker as an actor, in this process."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray

from offbeat.actors import environment_worker_actor
from offbeat.actors.call_batching import BatchedReply, CallBatcher
from offbeat.actors.environment_worker_actor import EnvironmentActor
from offbeat.environments.function_reward import FunctionReward
from offbeat.environments.killable import RewardTarget
from offbeat.environments.reward_value import NamedRewards
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import RolloutTask
from offbeat.rollouts.worker import EnvironmentSpec, EnvironmentWorker, GenerateOn
from offbeat.run_files.sharing import WriteLocation
from tests.support.environment_fakes import CharTokenizer, answers, task
from tests.support.environment_workers import CONFIG, WorkerOf

pytestmark = pytest.mark.real_clock

REWARDS = Path(__file__).parents[1] / "environments"
FENCE = Fence("run", 1)


async def exchange(
    asked: Sequence[tuple[int, GenerateRequest]], cancelled: Sequence[int], doubted: Sequence[int]
) -> list[BatchedReply[GenerateResult]]:
    return [BatchedReply(id_, await answers("7", "hang")(request)) for id_, request in asked]


class Actor(EnvironmentActor):
    """Actor with an engine that answers at once, and one that was retired."""

    def __init__(self, run_dir: Path) -> None:
        folder, retired = str(run_dir), {"engine-1": "run/engine-1"}
        super().__init__(EnvironmentSpec("environment-0", CONFIG, folder, folder, retired))
        self._engines = {"engine-0": CallBatcher(exchange)}


def actor_in(run_dir: Path) -> Any:
    """An actor; to a type checker, Ray's marks make its methods remote ones."""
    return Actor(run_dir)


class Hanging(FunctionReward):
    """Its rewards take for ever; ``asked`` is set when one is."""

    def __init__(self) -> None:
        target = RewardTarget(
            "user_rewards:hangs", REWARDS, {}, memory_mib=2048, deadline_s=60.0, start_s=120.0
        )
        super().__init__(CharTokenizer(), target, workers=1)
        self.asked = asyncio.Event()

    async def score(
        self, task: RolloutTask, result: GenerateResult
    ) -> Sequence[float | NamedRewards]:
        self.asked.set()
        return await super().score(task, result)


async def test_a_worker_may_be_closed_while_a_reward_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Hanging()

    def worker(
        spec: EnvironmentSpec, place: WriteLocation, generate: GenerateOn, *_: object
    ) -> EnvironmentWorker:
        return WorkerOf(place.directory, environment, CharTokenizer(), generate)

    monkeypatch.setattr(environment_worker_actor, "EnvironmentWorker", worker)
    actor = actor_in(tmp_path)
    rollout = asyncio.ensure_future(actor.exchange(FENCE, [(0, task())], []))
    asked = asyncio.ensure_future(environment.asked.wait())
    await asyncio.wait([rollout, asked], return_when=asyncio.FIRST_COMPLETED)
    assert asked.done(), rollout.result()
    await actor.close()
    (report, answers), columns = await rollout
    assert (report.incarnation, answers, columns) == ((await actor.ping()).incarnation, [], [])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_only_the_groups_that_succeeded_have_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_actor(name: str) -> None:
        raise ValueError(f"no actor {name}")

    monkeypatch.setattr(ray, "get_actor", no_actor)
    actor = actor_in(tmp_path)
    retired = msgspec.structs.replace(task(), engine="engine-1")
    asked, replies = [(0, retired), (1, task())], dict[int, Any]()
    while len(replies) < len(asked):
        (_, received), columns = await actor.exchange(FENCE, [] if replies else asked, [])
        replies |= {each.id: each for each in received}
        assert len(columns) == sum(each.failure is None for each in received)
    assert (replies[1].failure, replies[1].value.samples) == (None, 2)
    failure = replies[0].failure
    assert isinstance(failure, RolloutFailed)
    assert (failure.kind, failure.reason) == (FailureKind.INFRASTRUCTURE, "engine_lost")
    assert "run/engine-1" in str(failure)
    await actor.close()

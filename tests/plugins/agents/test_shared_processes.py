"""Episodes of an agent in one process: what one of them does to the others."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest

from offbeat.environments.environment_plugin import AgentClient
from offbeat.environments.frames import RewardTarget
from offbeat.environments.killable import RewardFailed
from offbeat.environments.reward_value import NamedRewards
from offbeat.messages.failures import Component, FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Prompt, Receipt, RolloutTask, SampleFailure, SampleStatus
from offbeat.plugins.agents.endpoint.agent_groups import AgentGroups
from offbeat.plugins.agents.factory import AgentFunction, playing
from offbeat.rollouts.calls import EngineClient, Generate
from offbeat.rollouts.samples import SampleFailurePolicy
from tests.support.agent_endpoint import DrawnBytes, started_groups

T = TypeVar("T")
HERE = Path(__file__).parent
MASK = SampleFailurePolicy("mask")
AT_ONCE = 64
NOBODY = msgspec.json.encode(AgentClient("", "", "")).decode()


def target(name: str, deadline_s: float | None = None, **options: Any) -> RewardTarget:
    return RewardTarget(f"sharing_agents:{name}", HERE, options, 2048, deadline_s, 120.0)


async def with_agent(
    name: str,
    use: Callable[[AgentGroups], Awaitable[T]],
    *,
    processes: int = 1,
    grace_s: float = 20.0,
    deadline_s: float | None = None,
    **options: Any,
) -> T:
    limits = playing(AT_ONCE, grace_s=grace_s)
    agent = AgentFunction(target(name, deadline_s, **options), processes, limits)
    async with started_groups(agent) as groups:
        return await use(groups)


def client(
    *, samples: int = 1, deadline_s: float = 60.0, generate: Generate | None = None, **row: Any
) -> EngineClient:
    task = RolloutTask(Prompt(7, 0, 7, row), 1, samples, "engine-0", 3, deadline_s)
    sampling = SamplingParams(max_new_tokens=40)
    return EngineClient(task, generate or DrawnBytes().generate, sampling, 4000)


def play(name: str, samples: int, policy: SampleFailurePolicy, **options: Any) -> Receipt:
    async def use(groups: AgentGroups) -> Receipt:
        return (await groups.run_group(client(samples=samples), policy))[0]

    return asyncio.run(with_agent(name, use, **options))


# --- a process that dies ----------------------------------------------------------------------------


def test_a_crash_costs_its_own_episode_and_no_retry_of_the_others(tmp_path: Path) -> None:
    receipt = play("last_one_crashes", 4, MASK, folder=str(tmp_path), episodes=4)
    assert sorted(receipt.statuses) == [SampleStatus.MASKED, *[SampleStatus.VALID] * 3]
    crashed = receipt.statuses.index(SampleStatus.MASKED)
    assert receipt.finish_reasons[crashed] == "agent_process_died"
    infrastructure, model = SampleFailure.INFRASTRUCTURE, SampleFailure.MODEL
    assert [
        (failure, retries)
        for failure, retries in zip(receipt.failures, receipt.retries, strict=True)
    ] == [(model, 0) if sample == crashed else (infrastructure, 1) for sample in range(4)]


@pytest.mark.parametrize("how", ["callback", "is killed"])
def test_a_crash_that_nobody_can_be_blamed_for_costs_no_episode(tmp_path: Path, how: str) -> None:
    receipt = play("last_one_crashes", 4, MASK, folder=str(tmp_path), episodes=4, how=how)
    assert receipt.masked_samples == 0 and receipt.retries == (1,) * 4


def test_a_group_that_its_samples_may_fail_is_tried_again_as_infrastructure(tmp_path: Path) -> None:
    with pytest.raises(RolloutFailed) as caught:
        play(
            "last_one_crashes",
            4,
            SampleFailurePolicy("fail_group"),
            folder=str(tmp_path),
            episodes=4,
            how="callback",
        )
    failed = caught.value
    assert (failed.kind, failed.source) == (FailureKind.INFRASTRUCTURE, Component.ENVIRONMENT)
    assert failed.reason == "agent_process_lost"


# --- an episode that is late ------------------------------------------------------------------------


async def beside_a_late_one(groups: AgentGroups) -> Receipt:
    """Return the receipt of a group in whose process another group was late."""
    other = asyncio.create_task(groups.run_group(client(hangs=False), MASK))
    with pytest.raises(RolloutFailed, match=r"\(deadline\)"):
        await groups.run_group(client(deadline_s=1.0, hangs=True), MASK)
    return (await other)[0]


def test_a_late_episode_ends_and_the_others_in_its_process_go_on(tmp_path: Path) -> None:
    receipt = asyncio.run(with_agent("one_hangs", beside_a_late_one, folder=str(tmp_path)))
    assert (receipt.masked_samples, receipt.retries) == (0, ())


def test_an_episode_that_blocks_its_process_costs_no_other_one(tmp_path: Path) -> None:
    receipt = asyncio.run(
        with_agent("one_blocks", beside_a_late_one, grace_s=0.1, folder=str(tmp_path))
    )
    assert (receipt.masked_samples, receipt.retries) == (0, (1,))
    assert receipt.failures == (SampleFailure.INFRASTRUCTURE,)


def test_an_episode_that_blocks_its_process_is_named_and_the_others_are_repeated(
    tmp_path: Path,
) -> None:
    kept = list[RolloutFailed]()
    watched = SampleFailurePolicy("mask", keep=lambda _, failure: kept.append(failure))

    async def both(groups: AgentGroups) -> tuple[Receipt, RolloutFailed]:
        other = asyncio.create_task(groups.run_group(client(hangs=False), watched))
        with pytest.raises(RolloutFailed) as blocked:
            await groups.run_group(client(hangs=True), MASK)
        return (await other)[0], blocked.value

    receipt, blocked = asyncio.run(
        with_agent("one_blocks", both, grace_s=5.0, deadline_s=3.0, folder=str(tmp_path))
    )
    assert receipt.masked_samples == 0
    assert {each.reason for each in kept} == {"agent_process_lost"}
    assert "because another episode keeps the event loop of its process: sharing_a" in str(kept[0])
    assert "keeps the event loop of its process: sharing_agents.py:" in blocked.detail
    assert "in one_blocks (episode_deadline)" in blocked.detail


@asynccontextmanager
async def pool_of(name: str) -> AsyncIterator[AgentFunction]:
    pool = AgentFunction(target(name), 1, playing(AT_ONCE))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def test_a_process_that_cancelled_an_episode_plays_no_further_ones(tmp_path: Path) -> None:
    pipes = [str(tmp_path / name) for name in ("silent", "written")]
    for pipe in pipes:
        os.mkfifo(pipe)

    async def pids() -> list[tuple[int, ...]]:
        async with pool_of("reads") as pool:
            before = pool.pids
            unending, ending = (
                asyncio.create_task(pool.call({"pipe": pipe}, [NOBODY])) for pipe in pipes
            )
            written = await asyncio.to_thread(Path(pipes[1]).open, "w")  # both have begun
            unending.cancel()
            (later,) = await pool.call({"pipe": ""}, [NOBODY])
            during = pool.pids
            written.close()
            assert await ending == [later] == [NamedRewards(1.0, {})]
            return [before, during]

    before, during = asyncio.run(pids())
    assert len(before) == 1 and len(during) == 2 and before[0] in during


def test_no_more_processes_end_their_last_episodes_than_the_pool_has(tmp_path: Path) -> None:
    pipes = [str(tmp_path / name) for name in ("silent", "written", "silent-too", "written-too")]
    for pipe in pipes:
        os.mkfifo(pipe)

    async def pids() -> tuple[int, ...]:
        async with pool_of("reads") as pool, AsyncExitStack() as at_end:
            endings = list[asyncio.Task[Any]]()
            for silent, written in (pipes[:2], pipes[2:]):
                unending, ending = (
                    asyncio.create_task(pool.call({"pipe": pipe}, [NOBODY]))
                    for pipe in (silent, written)
                )
                at_end.callback((await asyncio.to_thread(Path(written).open, "w")).close)
                endings.append(ending)
                unending.cancel()
                await pool.call({"pipe": ""}, [NOBODY])
            during = pool.pids
            await at_end.aclose()
            await asyncio.gather(*endings)
            return during

    assert len(asyncio.run(pids())) == 2, "one that ends, and one that plays"


def test_an_agent_that_answers_for_an_episode_that_there_is_not_loses_its_process() -> None:
    async def outcomes() -> list[object]:
        async with pool_of("answers_for_another") as pool:
            both = (pool.call({}, [NOBODY]) for _ in range(2))
            return list(await asyncio.gather(*both, return_exceptions=True))

    assert all(isinstance(outcome, RewardFailed) for outcome in asyncio.run(outcomes()))


# --- many at once -----------------------------------------------------------------------------------


class AllAtOnce:
    """Answers nobody until so many requests are open."""

    def __init__(self, requests: int) -> None:
        self._open, self._engine = asyncio.Barrier(requests), DrawnBytes()
        self.descriptors = self.processes = 0

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        if await self._open.wait() == 0:
            worker = psutil.Process()
            self.descriptors = worker.num_fds()
            self.processes = len(worker.children())
        return await self._engine.generate(request)


@pytest.mark.parametrize(
    ("episodes", "processes"), [(48, 2), pytest.param(1000, 16, marks=pytest.mark.long)]
)
def test_open_episodes_take_a_connection_each_and_no_process(episodes: int, processes: int) -> None:
    earlier = len(psutil.Process().children())  # of other tests

    async def use(groups: AgentGroups) -> None:
        engine = AllAtOnce(episodes)
        gc.collect()  # of earlier tests
        before = psutil.Process().num_fds()
        one = client(samples=episodes, generate=engine)
        receipt, _ = await groups.run_group(one, SampleFailurePolicy("fail_group"))
        assert receipt.rewards == (1.0,) * episodes
        assert engine.processes - earlier == processes
        assert engine.descriptors - before == episodes

    asyncio.run(with_agent("asks_once", use, processes=processes))

"""A rollout past its deadline, and what it is said to have waited for."""

import asyncio
from typing import Any

import msgspec
import pytest

from offbeat.messages.failures import Component, FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.rollouts.calls import Generate
from offbeat.rollouts.deadline import within_deadline
from tests.support.environment_fakes import task
from tests.support.virtual_time import run

TASK = msgspec.structs.replace(task(), deadline_s=20.0)
REQUEST = GenerateRequest("7-1", (1,), 1, SamplingParams(max_new_tokens=8))


async def never(request: GenerateRequest) -> GenerateResult:
    del request
    await asyncio.Event().wait()
    raise AssertionError


async def one_second(request: GenerateRequest) -> Any:
    del request
    await asyncio.sleep(1.0)


async def one_turn(generate: Generate) -> GenerateResult:
    return await generate(REQUEST)


def late(generate: Generate, roll_out: Any) -> tuple[RolloutFailed, float]:
    async def main() -> tuple[RolloutFailed, float]:
        with pytest.raises(RolloutFailed) as failure:
            await within_deadline(TASK, generate, roll_out)
        return failure.value, asyncio.get_running_loop().time()

    return run(main())


def test_a_rollout_whose_engine_does_not_answer_is_held_against_the_engine() -> None:
    failure, at_s = late(never, one_turn)
    assert (failure.kind, failure.reason) == (FailureKind.INFRASTRUCTURE, "deadline")
    assert failure.source is Component.ENGINE
    assert "engine-0 took longer than rollout.deadline_s=20" in str(failure)
    assert at_s == 20.0


def test_a_rollout_whose_environment_hangs_is_not_held_against_the_engine() -> None:
    async def hangs_after_an_answer(generate: Generate) -> None:
        await generate(REQUEST)
        await asyncio.Event().wait()

    failure, _ = late(one_second, hangs_after_an_answer)
    assert failure.source is Component.ENVIRONMENT
    assert "the environment took longer" in str(failure)


def test_a_late_rollout_of_several_episodes_waits_for_the_engine_if_one_of_them_does() -> None:
    async def two_episodes(generate: Generate) -> None:
        async with asyncio.TaskGroup() as episodes:
            episodes.create_task(one_turn(generate))
            episodes.create_task(asyncio.sleep(1000.0))

    failure, _ = late(never, two_episodes)
    assert failure.source is Component.ENGINE


def test_a_rollout_within_its_deadline_is_left_as_it_is() -> None:
    async def main() -> Any:
        return await within_deadline(TASK, one_second, one_turn)

    assert run(main()) is None


async def test_a_timeout_of_the_environments_own_is_not_the_deadline() -> None:
    async def gives_up(generate: Generate) -> None:
        del generate
        async with asyncio.timeout(1.0):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await within_deadline(TASK, never, gives_up)


async def test_a_rollout_that_is_cancelled_stays_cancelled() -> None:
    running = asyncio.ensure_future(within_deadline(TASK, never, one_turn))
    await asyncio.sleep(1.0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_a_request_that_was_given_up_before_is_not_what_a_late_rollout_waited_for() -> None:
    async def gives_up_and_hangs(generate: Generate) -> None:
        asking = asyncio.ensure_future(generate(REQUEST))
        await asyncio.wait({asking}, timeout=1.0)
        asking.cancel()
        await asyncio.Event().wait()

    failure, at_s = late(never, gives_up_and_hangs)
    assert (failure.source, at_s) == (Component.ENVIRONMENT, 20.0)

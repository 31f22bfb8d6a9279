"""Requests of environment workers arrive at an engine's actor in batches."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from offbeat.actors.engine_actor import StubEngineActor
from offbeat.config.sections.generator import EmbeddedGeneratorConfig, StubConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import EngineUnavailable, InvalidRequest, RemoteBug
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from tests.support.loading import load
from tests.support.release_parts import filled_release

FENCE = Fence("run", 1)
REQUEST = GenerateRequest("r", (3, 4, 5), 4, SamplingParams(max_new_tokens=4, seed=1))


async def start(run_dir: Path, kind: type[StubEngineActor] = StubEngineActor) -> StubEngineActor:
    """Create an actor that serves version 0."""
    actor = kind(
        EngineSpec(
            name="generator-0",
            model=ModelConfig(path="m"),
            generator=EmbeddedGeneratorConfig(),
            stub=StubConfig(),
            seed=0,
            run_dir=str(run_dir),
        )
    )
    await load(actor, 1, filled_release(0, name="stub.weight"))
    return actor


async def generate(actor: StubEngineActor) -> GenerateResult:
    (answer,) = await actor.exchange("worker", REQUEST.request_id, [(0, REQUEST)], [])
    if answer.failure is not None:
        raise answer.failure
    assert answer.value is not None
    return answer.value


async def test_a_batch_returns_what_the_engine_samples(tmp_path: Path) -> None:
    actor = await start(tmp_path)
    other = msgspec.structs.replace(REQUEST, request_id="other")
    answers = list[tuple[int, str]]()
    asked = [(4, REQUEST), (7, other)]
    while len(answers) < 2:
        got = await actor.exchange("worker", "incarnation", asked, [])
        answers += [(each.id, each.value.request_id) for each in got if each.value]
        asked = []
    assert sorted(answers) == [(4, "r"), (7, "other")]


async def test_a_request_that_cannot_be_served_fails_as_its_own_class(tmp_path: Path) -> None:
    actor = await start(tmp_path)
    first = asyncio.ensure_future(actor.exchange("worker", "incarnation", [(0, REQUEST)], []))
    await asyncio.sleep(0)
    again = await actor.exchange("worker", "incarnation", [(1, REQUEST)], [])
    (refused,) = [*await first, *again]
    assert refused.id == 1
    assert isinstance(refused.failure, InvalidRequest)


async def test_what_nobody_expected_is_a_bug_of_this_engine(tmp_path: Path) -> None:
    class Broken(StubEngineActor):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            raise ZeroDivisionError("division by zero")

    broken = await start(tmp_path, Broken)
    with pytest.raises(RemoteBug, match="generator-0 raised ZeroDivisionError in generate"):
        await generate(broken)


async def test_a_cancelled_request_is_no_longer_open_and_a_closed_engine_serves_none(
    tmp_path: Path,
) -> None:
    actor = await start(tmp_path)
    asked = asyncio.ensure_future(actor.exchange("worker", "incarnation", [(0, REQUEST)], []))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await actor.state(FENCE)).running == 1
    assert await actor.exchange("worker", "incarnation", [], [0]) == []
    assert await asked == []
    assert (await actor.state(FENCE)).running == 0
    await actor.close()
    with pytest.raises(EngineUnavailable, match="it was closed"):
        await generate(actor)

"""Requests of several workers, and of one worker for several controllers, at one engine."""

import asyncio
from typing import Any

from offbeat.messages.generation import GenerateRequest, SamplingParams
from offbeat.rollouts.calls import UniqueRequests
from tests.support.environment_fakes import task


class RefusesOpenIds:
    """An engine that refuses a request whose id is open, as real ones do."""

    def __init__(self) -> None:
        self.open = set[str]()
        self.seen = list[str]()

    async def __call__(self, request: GenerateRequest) -> Any:
        assert request.request_id not in self.open
        self.open.add(request.request_id)
        self.seen.append(request.request_id)
        await asyncio.sleep(1.0)
        self.open.remove(request.request_id)


async def test_one_attempt_sent_by_two_workers_is_two_requests() -> None:
    """The dispatch that the dead controller had not made durable, and the one of its successor."""
    engine = RefusesOpenIds()
    request = GenerateRequest(task().request_prefix, (1,), 1, SamplingParams())
    first, second = UniqueRequests("environment-0-a"), UniqueRequests("environment-1-b")
    async with asyncio.TaskGroup() as sent:
        for worker in (first, second, first):
            sent.create_task(worker.send(engine, request))
    assert len(set(engine.seen)) == 3
    assert all(id_.endswith(task().request_prefix) for id_ in engine.seen)

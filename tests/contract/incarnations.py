"""Waiting for a process to come up: in tests of real ones, nobody else would tell."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from offbeat.controller.ports import Generator
from offbeat.messages.failures import ActorLost
from offbeat.messages.fences import Fence
from offbeat.messages.weights import EngineState

T = TypeVar("T")
PATIENCE_S = 60


async def answer_of(ask: Callable[[], Awaitable[T]]) -> T:
    """What it answers once it lives."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await ask()
            except ActorLost:
                await asyncio.sleep(0.05)


async def next_incarnation(generator: Generator, fence: Fence, after: str) -> EngineState:
    """The state of the first process that is not the incarnation ``after``."""

    async def ask() -> EngineState:
        state = await generator.state(fence)
        if state.incarnation == after:
            raise ActorLost(generator.name, "state", "its next process has not started")
        return state

    return await answer_of(ask)

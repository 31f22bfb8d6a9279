"""Calls of vLLM in a weight sync: each has a name and a deadline, and ends with the engine core."""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from offbeat.generators.vllm.engine import VllmEngine
from offbeat.messages.failures import DeadlineExceeded, OffbeatError
from offbeat.messages.text import first_line

T = TypeVar("T")
_CALLS: Final = "a call of the weight sync"


class CallRefused(OffbeatError):
    """vLLM raised in a call of a weight sync."""

    def __init__(self, call: str, detail: str) -> None:
        super().__init__(call, detail)
        self.call, self.detail = call, detail

    def __str__(self) -> str:
        return f"vLLM refused {self.call}: {self.detail}"


class Calls:
    """To one engine."""

    def __init__(self, engine: VllmEngine, deadline_s: float) -> None:
        self._engine, self._deadline_s = engine, deadline_s

    async def __call__(self, what: str, reply: Awaitable[T]) -> T:
        """The answer.

        Raises:
            EngineUnavailable: The engine core has died.
            DeadlineExceeded: It takes too long.
            CallRefused: vLLM raised.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self.however_long(what, reply)
        except TimeoutError:
            on = f"{what} of {self._engine.name}"
            raise DeadlineExceeded(_CALLS, on, self._deadline_s) from None

    async def however_long(self, what: str, reply: Awaitable[T]) -> T:
        """Make a call without a deadline, for work as long as sampling: the caller's deadline bounds it."""
        try:
            return await self._engine.answered(f"take weights ({what})", reply)
        except OffbeatError:
            raise
        except Exception as error:  # a worker's error arrives as text in a plain Exception
            raise CallRefused(what, first_line(error)) from error

"""Calls to vLLM during a weight sync.

Each call has a name and a deadline, and fails if the core dies.
"""

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from offbeat.messages.failures import DeadlineExceeded, OffbeatError
from offbeat.messages.text import first_line
from offbeat.plugins.vllm.engine import VllmEngine

T = TypeVar("T")
_CALLS: Final = "a call of the weight sync"


class CallRefused(OffbeatError):
    """A call of a weight sync raised inside vLLM.

    Fix: see the engine's log; if it took too long, raise ``generator.vllm.call_deadline_s``.
    """

    call: str
    detail: str

    def __str__(self) -> str:
        return f"vLLM refused {self.call}: {self.detail}"


class Calls:
    """Named calls to one engine, each with a deadline."""

    def __init__(self, engine: VllmEngine, deadline_s: float) -> None:
        self._engine, self._deadline_s = engine, deadline_s

    async def __call__(self, what: str, reply: Awaitable[T]) -> T:
        """Await the reply and return it.

        Raises:
            EngineUnavailable: The engine core has died.
            DeadlineExceeded: The reply took longer than the deadline.
            CallRefused: vLLM raised.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self.however_long(what, reply)
        except TimeoutError:
            on = f"{what} of {self._engine.name}"
            raise DeadlineExceeded(_CALLS, on, self._deadline_s) from None

    async def however_long(self, what: str, reply: Awaitable[T]) -> T:
        """Await a reply without a deadline.

        For work that lasts as long as sampling. The caller limits its time.
        """
        try:
            return await self._engine.await_answer(f"take weights ({what})", reply)
        except OffbeatError:
            raise
        except Exception as error:  # vLLM sends a worker's error as text in a plain Exception
            raise CallRefused(what, first_line(error)) from error

"""One sampling for a request and its repetitions."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from offbeat.plugins.agents.endpoint.session import ChatTurn, SampleSession, TokenTurn, Turn

Asked = ChatTurn | TokenTurn


@dataclass(slots=True, eq=False)
class _Call:
    task: asyncio.Task[Turn]
    waiters: int = 0


class SharedCalls:
    """The requests of one session. All methods belong to one event loop.

    A client whose connection broke sends its request again. While the first one runs, the second
    waits for the same answer; once it was answered, it gets that answer, until a later turn
    continues it. A call that nobody waits for any more is cancelled.
    """

    def __init__(self, session: SampleSession) -> None:
        self._session = session
        self._calls: dict[Asked, _Call] = {}
        self._running = set[asyncio.Task[Turn]]()

    async def answer(
        self, asked: Asked, sample: Callable[[], Coroutine[Any, Any, Turn]], *, may_repeat: bool
    ) -> Turn:
        """Return the answer to a request; ``sample`` is called unless it repeats another one.

        Args:
            asked: The request.
            sample: Makes the answer; what it raises is raised here.
            may_repeat: False if the client says that this is no repetition.
        """
        call = self._calls.get(asked) if may_repeat else None
        if call is None or not self._can_answer(call):
            task = asyncio.create_task(sample(), name="endpoint-sample")
            self._running.add(task)
            task.add_done_callback(self._ended)
            call = self._calls[asked] = _Call(task)
        call.waiters += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.waiters -= 1
            if not call.waiters and not call.task.done():
                call.task.cancel()

    async def close(self) -> None:
        """Cancel what runs."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _can_answer(self, call: _Call) -> bool:
        task = call.task
        if not task.done():
            return task.cancelling() == 0
        if task.cancelled() or task.exception() is not None:
            return False
        return not self._session.was_continued(task.result())

    def _ended(self, task: asyncio.Task[Turn]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has seen it; nobody may have

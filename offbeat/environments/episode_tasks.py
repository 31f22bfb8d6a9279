"""Separates the asyncio tasks of one episode from those of the others in its process."""

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Final, TypeVar
from weakref import WeakSet

from offbeat.environments.episode_mark import EpisodeMark
from offbeat.environments.exits import ContainedCoroutine

T = TypeVar("T")
_NONE: Final = 0
_EPISODE: ContextVar[int] = ContextVar("episode", default=_NONE)


class EpisodeTasks:
    """Task factory of an event loop: a task belongs to the episode of the task that created it.

    While a task of an episode executes, the mark has the number of the episode. An exception that
    would end the process, such as ``SystemExit``, fails the task with ``ExitRaised``.
    """

    def __init__(self, mark: EpisodeMark) -> None:
        self._mark = mark
        self._tasks: dict[int, WeakSet[asyncio.Task[Any]]] = {}

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Any,  # noqa: ANN401 - a coroutine, or what a generator makes of one
        **options: Any,  # noqa: ANN401 - those of asyncio
    ) -> "asyncio.Task[Any]":
        context = options.get("context")
        number = _EPISODE.get() if context is None else context.get(_EPISODE, _NONE)
        if number != _NONE:
            coroutine = _Marked(coroutine, self._mark, number)
        task = asyncio.Task(coroutine, loop=loop, **options)
        if number in self._tasks:
            self._tasks[number].add(task)
        return task

    def begin(self, number: int, episode: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Return the first task of an episode. Numbers begin with 1."""
        context = copy_context()
        context.run(_EPISODE.set, number)
        self._tasks[number] = WeakSet()
        loop = asyncio.get_running_loop()
        return loop.create_task(episode, name=f"episode-{number}", context=context)

    async def end(self, number: int) -> None:
        """Cancel the tasks that the episode has left running, other than the current one."""
        left = self._tasks.pop(number) - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class _Marked(ContainedCoroutine[T]):
    """A contained coroutine that marks its episode while it executes."""

    def __init__(self, inner: Coroutine[Any, Any, T], mark: EpisodeMark, number: int) -> None:
        super().__init__(inner)
        self._mark, self._number = mark, number

    @contextmanager
    def _executing(self) -> Generator[None]:
        self._mark.number = self._number
        try:
            with super()._executing():
                yield
        finally:
            self._mark.number = _NONE

"""Plays episodes of an agent in a child process (``run_child``): many at once, on one event loop.

Each episode is one call. The call's row is the task, and its only response is an ``AgentClient``.
The parent may cancel a call with ``CancelCall``, and is always told when a call ends. When an
episode ends, its remaining tasks are cancelled, but not the tasks of other episodes.
"""

import asyncio
import re
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from operator import contains
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from weakref import WeakSet

import msgspec

from offbeat.config.user_code import describe
from offbeat.environments.child_setup import (
    ChildSide,
    answer,
    restrict_to_this_process,
    run_child,
)
from offbeat.environments.environment_plugin import AgentClient
from offbeat.environments.exits import ContainedCoroutine
from offbeat.environments.frames import CallMark, CancelCall, RewardCall, RewardReply, frame_message
from offbeat.environments.protocol import EnvironmentUnavailable
from offbeat.environments.reward_value import (
    BadReward,
    NamedRewards,
    parse_reward,
    short_answer,
    unavailable,
)
from offbeat.messages.framing import LENGTH, body_length
from offbeat.messages.redaction import cut_head

T = TypeVar("T")
_NONE: Final = 0
_BLOCKED_S: Final = 5.0
"""Time without a turn of the event loop after which an episode counts as blocking the loop."""

_EPISODE: ContextVar[int] = ContextVar("episode", default=_NONE)
_FROM_PARENT = msgspec.json.Decoder(RewardCall | CancelCall)
_REWARD: Final = "reward"
_ANSWER: Final = "answer"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MOST_NAMES: Final = 32


async def serve_episodes(child: ChildSide) -> None:
    """Play episodes until the parent closes the socket."""
    reader, writer = await asyncio.open_unix_connection(sock=child.channel)
    send = restrict_to_this_process(lambda message: writer.write(frame_message(message)))
    tasks = EpisodeTasks(child.mark)
    loop = asyncio.get_running_loop()
    loop.set_task_factory(tasks)
    deadline_s = child.target.deadline_s or _BLOCKED_S
    _LoopWatch(child.mark, child.target.working_dir, min(_BLOCKED_S, deadline_s / 4)).start()
    running: dict[int, asyncio.Task[None]] = {}
    cancelled = set[int]()

    async def play(call: RewardCall) -> None:
        number, working_dir = call.number, child.target.working_dir
        reply = RewardReply(number, 0, problem=BadReward("cancelled", "by the parent"))
        try:
            is_cancelled = partial(contains, cancelled, number)
            reply = await answer(child.function, call, 0, working_dir, is_cancelled=is_cancelled)
        except asyncio.CancelledError:
            pass  # cancelled by the parent
        finally:
            try:
                await tasks.end(number)
            finally:
                del running[number]
                cancelled.discard(number)
                send(reply)

    while (message := await _receive(reader)) is not None:
        match message:
            case RewardCall():
                running[message.number] = tasks.begin(message.number, play(message))
            case CancelCall():
                if (episode := running.get(message.number)) is not None:
                    cancelled.add(message.number)
                    loop.call_soon(episode.cancel)  # after its first step: a reply is due


async def _receive(reader: asyncio.StreamReader) -> RewardCall | CancelCall | None:
    """Return the next message, or None after the parent closed the socket."""
    try:
        header = await reader.readexactly(LENGTH.size)
        return _FROM_PARENT.decode(await reader.readexactly(body_length(header)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class _LoopWatch:
    """Writes into the mark which code blocks the event loop and so stops other episodes."""

    def __init__(self, mark: CallMark, user_dir: Path, patience_s: float) -> None:
        self._mark, self._user_dir, self._patience_s = mark, user_dir, patience_s
        self._turns = 0
        self._loop_thread = threading.get_ident()

    def start(self) -> None:
        """Start to watch the running event loop, from a thread that ends with the process."""
        self._count_turn()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def _count_turn(self) -> None:
        self._turns += 1
        asyncio.get_running_loop().call_later(self._patience_s / 4, self._count_turn)

    def _watch(self) -> None:
        never, was_blocked = threading.Event(), False
        while True:
            before = self._turns
            never.wait(self._patience_s)
            is_blocked = self._turns == before
            self._mark.blocking = self._find_line() if is_blocked else ""
            if is_blocked and not was_blocked:
                told = f"{self._mark.blocking} keeps the event loop, so no other episode runs here"
                sys.stderr.write(f"agent: {told}; use asyncio.to_thread\n")
            was_blocked = is_blocked

    def _find_line(self) -> str:
        """Return the line that the loop executes: the innermost one of the user's modules."""
        # Documented, despite its name.
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        lines = list(traceback.walk_stack(frame))
        inside = [
            each
            for each in lines
            if Path(each[0].f_code.co_filename).is_relative_to(self._user_dir)
        ]
        for at, line in inside or lines:
            return f"{Path(at.f_code.co_filename).name}:{line} in {at.f_code.co_name}"
        return "unknown code"


class EpisodeTasks:
    """Task factory of an event loop: a task belongs to the episode of the task that created it.

    While a task of an episode executes, the mark has the number of the episode. An exception that
    would end the process, such as ``SystemExit``, fails the task with ``ExitRaised``.
    """

    def __init__(self, mark: CallMark) -> None:
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
        """Create the first task of an episode. Numbers begin with 1."""
        context = copy_context()
        context.run(_EPISODE.set, number)
        self._tasks[number] = WeakSet()
        loop = asyncio.get_running_loop()
        return loop.create_task(episode, name=f"episode-{number}", context=context)

    async def end(self, number: int) -> None:
        """Cancel the episode's running tasks, other than the current one."""
        left = self._tasks.pop(number) - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


class _Marked(ContainedCoroutine[T]):
    """Wraps a coroutine of an episode and marks the episode while the coroutine executes."""

    def __init__(self, inner: Coroutine[Any, Any, T], mark: CallMark, number: int) -> None:
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


def agent_as_reward(run: Callable[..., Any]) -> Callable[..., Awaitable[object]]:
    """Wrap an async agent function as an async reward function.

    In place of a response, the reward function gets an ``AgentClient`` as JSON.
    """

    async def score(row: dict[str, Any], client: str, **options: Any) -> object:  # noqa: ANN401
        try:
            value = await run(row, msgspec.json.decode(client, type=AgentClient), **options)
        except EnvironmentUnavailable as error:
            return unavailable(describe(error))
        return _reward_in(value)

    return score


def _reward_in(value: object) -> object:
    """Return an agent's result: a number, or a mapping with the rewards and the final answer."""
    if not isinstance(value, Mapping):
        return value
    named = dict(cast("Mapping[object, object]", value))
    answers = _ANSWER in named
    answer = named.pop(_ANSWER, None)
    if not isinstance(answer, str | None):
        got = cut_head(repr(answer), 80)
        problem = f"{_ANSWER!r} is {type(answer).__name__} {got}: it is the final answer, as text"
        return BadReward("reward_wrong_type", problem)
    shown = cut_head(repr(sorted(map(str, named))), 200)
    if _REWARD not in named:
        problem = f"the agent returned {shown} without {_REWARD!r}"
        return BadReward("reward_wrong_type", problem)
    if len(named) > _MOST_NAMES or not all(
        isinstance(name, str) and _NAME.fullmatch(name) for name in named
    ):
        problem = (
            f"the agent named its rewards {shown}: use at most {_MOST_NAMES} "
            "names, of letters, digits, '_' and '-'"
        )
        return BadReward("reward_wrong_type", problem)
    trained, metrics = parse_reward(named.pop(_REWARD)), _parse_metrics(named)
    for each in (trained, metrics):
        if isinstance(each, BadReward):
            return each
    said = short_answer(answer or "") if answers else None
    return NamedRewards(cast("float", trained), cast("dict[str, float | None]", metrics), said)


def _parse_metrics(named: Mapping[object, object]) -> dict[str, float | None] | BadReward:
    """Return the metrics by name, None for a metric that does not apply to the sample."""
    by_name = dict[str, float | None]()
    for name, each in named.items():
        metric = None if each is None else parse_reward(each, f"the metric {name!r}")
        if isinstance(metric, BadReward):
            return metric
        by_name[str(name)] = metric
    return by_name


if __name__ == "__main__":
    run_child(lambda child: asyncio.run(serve_episodes(child)), agent_as_reward)

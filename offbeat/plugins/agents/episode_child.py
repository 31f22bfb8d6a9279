"""Child processes that play many episodes of an agent at once, each one a call.

| what happens                               | to its episode  | to the others in the process       |
|--------------------------------------------|-----------------|------------------------------------|
| it returns or raises                       | is answered     | nothing                            |
| it is cancelled, and ends                  | is cancelled    | go on; the process takes no others |
| it is cancelled, and does not end in time  | is cancelled    | the process is killed: ``SHARED``  |
| the process dies while it executes         | has failed      | ``SHARED``                         |
| the process dies of SIGKILL, or while none | ``SHARED``, but | ``SHARED``                         |
| of them executes                           | for one alone   |                                    |

An episode that fails with ``RewardFault.SHARED`` is not at fault. The process marks in shared memory
which episode executes (``EpisodeMark``). An episode that runs alone in its process is not cancelled: its
process is killed.
"""

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Self

from offbeat.environments.frames import RewardTarget
from offbeat.environments.killable import CallCount, Child, RewardFailed, Streams, spawn
from offbeat.environments.reward_value import RewardFault
from offbeat.messages.groups import PROCESS_LOST
from offbeat.plugins.agents.episode_mark import EpisodeMark
from offbeat.plugins.agents.episode_serving import CancelCall

_PROGRAM: Final = "offbeat.plugins.agents.agent_child"
"""Module that a child runs to play episodes."""

_GRACE_S: Final = 2.0
"""Time for a cancelled episode to end before its process is killed, with all others in it."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of the episodes that a process plays."""

    at_once: int
    in_all: int | None = None  # after so many it takes no more; None: never
    grace_s: float = _GRACE_S  # for a cancelled episode to end


class EpisodeChild(Child):
    """A process that plays episodes, which are its calls.

    It is worn when it has cancelled an episode, which may have left threads or processes, or has
    played as many as it should.
    """

    outlives_calls = True

    def __init__(
        self,
        target: RewardTarget,
        process: Process,
        streams: Streams,
        *,
        mark: EpisodeMark,
        limits: EpisodeLimits,
        count: CallCount,
        on_call_end: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        events = {"on_call_end": on_call_end, "on_change": on_change}
        super().__init__(target, process, streams, count=count, **events)
        self._mark, self._limits = mark, limits
        self._killed_for: int | None = None  # the episode that did not end

    @classmethod
    async def start_with(
        cls,
        limits: EpisodeLimits,
        target: RewardTarget,
        *,
        count: CallCount,
        on_call_end: Callable[[], None],
        on_change: Callable[[], None],
    ) -> Self:
        """Start a process within ``limits``, as ``start`` does.

        Raises:
            RewardFailed: As ``start``.
        """
        with ExitStack() as undo, ExitStack() as passed:  # undone if cancelled, too
            mark, mark_fd = EpisodeMark.create()
            undo.callback(mark.close)
            passed.callback(os.close, mark_fd)
            process, streams = await spawn(_PROGRAM, target, [mark_fd])
            undo.pop_all()
        events = {"on_call_end": on_call_end, "on_change": on_change}
        child = cls(target, process, streams, mark=mark, limits=limits, count=count, **events)
        await child.begin()
        return child

    def _cancel(self, number: int) -> None:
        if self._limits.at_once == 1:
            self._kill_for(number)
            return
        self._send(CancelCall(number))
        asyncio.get_running_loop().call_later(self._limits.grace_s, self._kill_for, number)
        self._wear()

    def _kill_for(self, number: int) -> None:
        if number in self._open:
            self._killed_for = number
            self.kill()

    def _wear(self) -> None:
        if not self.is_worn:
            self.is_worn = True
            self._on_change()

    def _close_call(self, number: int) -> None:
        super()._close_call(number)
        if self._limits.in_all is not None and self._begun >= self._limits.in_all:
            self._wear()

    def _explain_loss(self, lost: RewardFailed) -> Callable[[int], RewardFailed]:
        executing, episodes = self._mark.number, len(self._open)
        if self._killed_for is not None:
            blocked = "another episode could not be ended, because this one kept the event loop"
            lost = RewardFailed(lost.reason, f"{blocked} of {self._target.target}; killed")
        elif self._process.returncode == -signal.SIGKILL:
            executing = 0  # by whoever it was
        detail = f"its process ended with {episodes} episodes in it: {lost.detail}"

        def explain(number: int) -> RewardFailed:
            if episodes > 1 and number != executing:
                return RewardFailed(PROCESS_LOST, detail, RewardFault.SHARED)
            return lost

        return explain

    async def _ended(self) -> None:
        await super()._ended()
        self._mark.close()

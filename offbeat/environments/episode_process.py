"""One process that plays many episodes of an agent at once, seen from its worker.

| what happens                               | to its episode  | to the others in the process       |
|--------------------------------------------|-----------------|------------------------------------|
| it returns or raises                       | is answered     | nothing                            |
| it is cancelled, and ends                  | is cancelled    | go on; the process takes no others |
| it is cancelled, and does not end in time  | is cancelled    | the process is killed: ``SHARED``  |
| the process dies while it executes         | has failed      | ``SHARED``                         |
| the process dies of SIGKILL, or while none | ``SHARED``, but | ``SHARED``                         |
| of them executes                           | for one alone   |                                    |

An episode that fails with ``RewardFault.SHARED`` is not at fault. Which one executes is read from
the memory that the process marks it in (``EpisodeMark``).
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec

from offbeat.environments.episode_mark import EpisodeMark
from offbeat.environments.frames import CancelCall, Ready, Refused, RewardCall, RewardReply
from offbeat.environments.killable import RewardChild, RewardFailed, RewardTarget
from offbeat.environments.reward_value import RewardFault
from offbeat.messages.groups import PROCESS_LOST

_GRACE_S: Final = 2.0
"""Time for a cancelled episode to end before its process is killed, with all others in it."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of the episodes that a process plays."""

    at_once: int
    in_all: int | None = None  # after so many it takes no more; None: never
    grace_s: float = _GRACE_S  # for a cancelled episode to end


class EpisodeProcess:
    """A process, the episodes that are open in it, and the socket to it."""

    def __init__(
        self,
        child: RewardChild,
        mark: EpisodeMark,
        limits: EpisodeLimits,
        *,
        on_episode_end: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called when it is worn or gone; see there."""
        self._child, self._mark, self._limits = child, mark, limits
        self._on_episode_end, self._on_change = on_episode_end, on_change
        self._open: dict[int, asyncio.Future[RewardReply]] = {}
        self._begun = 0
        self._is_draining = False
        self._killed_for: int | None = None  # the episode that did not end
        self._end: asyncio.Task[None] | None = None
        self._receiving = asyncio.create_task(self._receive(), name="episode-replies")
        self.is_worn = False
        """Whether it is to be replaced: it has cancelled an episode, which may have left threads or
        processes, or has played as many as it should."""
        self.is_gone = False

    @classmethod
    async def start(
        cls, target: RewardTarget, limits: EpisodeLimits, **callbacks: Callable[[], None]
    ) -> Self:
        """Start a process and import the target in it.

        Raises:
            RewardFailed: As ``RewardChild.start``.
        """
        mark, mark_fd = EpisodeMark.create()
        try:
            child = await RewardChild.start(target, mark_fd)
        except BaseException:
            mark.close()
            raise
        finally:
            os.close(mark_fd)
        return cls(child, mark, limits, **callbacks)

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def open_episodes(self) -> int:
        return len(self._open)

    async def play(self, row: dict[str, Any], client: str) -> RewardReply:
        """Play an episode; a cancellation ends it, or else its process.

        Raises:
            RewardFailed: The process is gone.
        """
        self._begun += 1
        number = self._begun
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._child.send(RewardCall(number, msgspec.Raw(msgspec.json.encode(row)), [client]))
        try:
            return await answer
        except asyncio.CancelledError:
            self._cancel(number)
            raise

    def drain(self) -> None:
        """End the process when its last episode has ended."""
        self._is_draining = True
        if not self._open:
            self.kill()

    def kill(self) -> asyncio.Task[None]:
        """Kill the process group; the task is done when the process is gone."""
        if self._end is None:
            self._child.kill()
            self._end = asyncio.create_task(self._ended(), name="agent-process-end")
        return self._end

    async def close(self) -> None:
        """Kill the process group and wait until the process is gone."""
        await asyncio.wait({self.kill()})
        await asyncio.wait({self._receiving})

    def _cancel(self, number: int) -> None:
        if number not in self._open:
            return  # it ended at this moment
        if self._limits.at_once == 1:
            self._kill_for(number)
            return
        self._child.send(CancelCall(number))
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

    async def _receive(self) -> None:
        lost = RewardFailed("reward_process_died", f"the process of {self._child.target.target}")
        try:
            while True:
                self._replied(await self._child.receive())
        except RewardFailed as error:
            lost = error
        finally:
            self._lose(lost)

    def _replied(self, reply: Ready | Refused | RewardReply) -> None:
        answer = self._open.pop(reply.call, None) if isinstance(reply, RewardReply) else None
        if answer is None or not isinstance(reply, RewardReply):
            detail = f"it sent {reply!r:.200}: user code writes to this program's socket"
            raise RewardFailed("reward_answered_twice", detail)
        if not answer.done():  # done: cancelled
            answer.set_result(reply)
        self._on_episode_end()
        if self._limits.in_all is not None and self._begun >= self._limits.in_all:
            self._wear()
        if self._is_draining and not self._open:
            self.kill()

    def _lose(self, lost: RewardFailed) -> None:
        """Fail the open episodes, and end what is left of the process group."""
        self.kill()
        executing = self._mark.number
        if self._killed_for is not None:
            blocked = "another episode could not be ended, because this one kept the event loop"
            lost = RewardFailed(lost.reason, f"{blocked} of {self._child.target.target}; killed")
        elif self._child.process.returncode == -signal.SIGKILL:
            executing = 0  # by whoever it was
        self._mark.close()
        is_shared, opened = len(self._open) > 1, self._open
        self._open, self.is_gone = {}, True
        for number, answer in opened.items():
            if not answer.done():
                failed = lost
                if is_shared and number != executing:
                    detail = f"its process ended with {len(opened)} episodes in it: {lost.detail}"
                    failed = RewardFailed(PROCESS_LOST, detail, RewardFault.SHARED)
                answer.set_exception(failed)
            self._on_episode_end()
        self._on_change()

    async def _ended(self) -> None:
        await self._child.close()
        self._receiving.cancel()  # a process that left the group may hold the socket open

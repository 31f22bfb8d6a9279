"""A pool of processes of constant size for the episodes of an agent."""

import asyncio
from collections.abc import Callable
from typing import Any

from offbeat.environments.episode_process import EpisodeLimits, EpisodeProcess
from offbeat.environments.frames import RewardReply
from offbeat.environments.killable import RewardFailed, RewardTarget


class EpisodePool:
    """Pool of ``size`` processes; further episodes wait their turn, first come, first served.

    All methods belong to one event loop.
    """

    def __init__(self, target: RewardTarget, size: int, limits: EpisodeLimits) -> None:
        self._target, self._size, self._limits = target, size, limits
        self._places = asyncio.Semaphore(size * limits.at_once)
        self._slots: list[_Slot] = []

    async def start(self) -> None:
        """Start all processes.

        Raises:
            RewardFailed: The target cannot be imported. No process is left running.
        """
        self._slots = [
            _Slot(self._target, self._limits, self._places.release) for _ in range(self._size)
        ]
        try:
            for slot in self._slots:
                await slot.process()
        except BaseException:
            await self.close()
            raise

    async def play(self, row: dict[str, Any], client: str) -> RewardReply:
        """Play an episode and return its reply, which has a reward. A cancellation ends it.

        Raises:
            RewardFailed: It has no reward.
        """
        await self._places.acquire()
        # An episode in a process that is being replaced has a place too, so the emptiest of the
        # others has room.
        slot = min(self._slots, key=lambda each: each.load)
        slot.expected += 1
        try:
            process = await slot.process()
        except BaseException:
            self._places.release()
            raise
        finally:
            slot.expected -= 1
        reply = await process.play(row, client)
        if reply.reward is None:
            raise RewardFailed(reply.reason, reply.detail, reply.fault, traceback=reply.traceback)
        return reply

    async def close(self) -> None:
        """Kill every process."""
        for slot in self._slots:
            await slot.close()
        self._slots = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, also of processes that are being replaced."""
        return tuple(pid for slot in self._slots for pid in slot.pids)


class _Slot:
    """A place in the pool, whose process is ready, starting, or failed to start.

    A worn process is replaced at once and plays its open episodes to their ends meanwhile; at most
    one does so, therefore a slot has never more than two.
    """

    def __init__(
        self, target: RewardTarget, limits: EpisodeLimits, on_episode_end: Callable[[], None]
    ) -> None:
        self._target, self._limits, self._on_episode_end = target, limits, on_episode_end
        self._draining: EpisodeProcess | None = None
        self._ends = set[asyncio.Task[None]]()  # of processes that were replaced
        self._is_closing = False
        self._start = self._starting()
        self.expected = 0  # episodes that wait for the process to start

    @property
    def load(self) -> int:
        current = self._current
        return self.expected + (0 if current is None else current.open_episodes)

    @property
    def pids(self) -> list[int]:
        both = (self._current, self._draining)
        return [each.pid for each in both if each is not None and not each.is_gone]

    async def process(self) -> EpisodeProcess:
        """Return the process, once started. A cancellation here does not cancel the start.

        Raises:
            RewardFailed: It did not start. The next call tries again.
        """
        while True:
            start = self._start
            await asyncio.wait({start})
            if start is self._start:  # else it has been replaced meanwhile
                break
        try:
            return start.result()
        except RewardFailed:
            self._start = self._starting()
            raise

    async def close(self) -> None:
        self._is_closing = True
        self._start.cancel()
        await asyncio.wait({self._start})
        for each in (self._current, self._draining):
            if each is not None:
                await each.close()
        if self._ends:
            await asyncio.wait(self._ends)

    @property
    def _current(self) -> EpisodeProcess | None:
        is_ready = self._start.done() and not self._start.cancelled()
        return self._start.result() if is_ready and self._start.exception() is None else None

    def _starting(self) -> asyncio.Task[EpisodeProcess]:
        start = EpisodeProcess.start(
            self._target,
            self._limits,
            on_episode_end=self._on_episode_end,
            on_change=self._replace,
        )
        return asyncio.create_task(start, name="agent-process-start")

    def _replace(self) -> None:
        """Start another process if the current one is gone, or worn and none drains."""
        if self._draining is not None and self._draining.is_gone:
            self._keep_until_ended(self._draining)
            self._draining = None
        current = self._current
        if self._is_closing or current is None:
            return
        if current.is_gone:
            self._keep_until_ended(current)
            self._start = self._starting()
        elif current.is_worn and self._draining is None:
            self._draining = current
            self._start = self._starting()
            current.drain()

    def _keep_until_ended(self, process: EpisodeProcess) -> None:
        end = process.kill()
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)

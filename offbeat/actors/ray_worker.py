"""Tracks an environment worker for its caller: its process is up, hangs, or is being restarted.

    starting --it answered--> up --lost, or killed--> gone --it answered--> up
       |                                                |
       +--no answer within the time to start: killed----+--the same, again and again

Calls to a worker that is gone fail at once for as long as Ray takes to start it again, and each would
cost its group an attempt. So nobody makes one before it has answered a probe.

A process that is killed while no call is under way is restarted by Ray without an error for anybody.
So every reply names the process that gives it, and a name that is new is reported.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal, Protocol, TypeVar

import ray
import structlog

from offbeat.actors.call import reply_of
from offbeat.actors.handles import Handle
from offbeat.messages.failures import ActorLost, StartFailed
from offbeat.messages.fixed_times import RETRY_S

T = TypeVar("T")
log = structlog.stdlib.get_logger()
_SILENT_S: Final = 10.0  # one that answers a probe no sooner hangs
_START_S: Final = 120.0  # for a new process, imports included; then it hangs and is killed


OnJoined = Callable[[str, str], None]
"""Gets the name of a worker and that of its process, when a process has answered."""


class WorkerProcess(Protocol):
    """The process of a worker, whichever is there."""

    async def ping(self, during: str) -> str:
        """Return the name of the process, once it answers.

        Raises:
            ActorLost: It is gone, or being started.
            StartFailed: Its constructor raised.
        """
        ...

    def kill(self) -> None:
        """End it, so that another one is started."""
        ...


class RayProcess:
    """The process of a Ray actor."""

    def __init__(self, name: str, handle: Handle) -> None:
        self._name, self._handle = name, handle

    async def ping(self, during: str) -> str:
        return await reply_of(self._handle.ping.remote(), self._name, during)

    def kill(self) -> None:
        ray.kill(self._handle, no_restart=False)


class RayWorker:
    """One worker, whose actor Ray restarts whenever it is lost."""

    def __init__(self, name: str, handle: Handle, process: WorkerProcess | None = None) -> None:
        """``process`` None: the one of the actor ``handle``."""
        self.name, self.handle = name, handle
        self._process = process or RayProcess(name, handle)
        self._standing: Literal["starting", "up", "gone"] = "starting"
        self._probe: asyncio.Task[None] | None = None  # the one under way
        self._reported = set[str]()  # processes that have answered
        self.on_joined: OnJoined = lambda name, incarnation: None  # noqa: ARG005 - nobody counts

    @property
    def gone(self) -> bool:
        """Return whether its process was lost and no other one has answered yet."""
        return self._standing == "gone"

    async def answer(self, ref: "ray.ObjectRef[tuple[str, T]]", during: str) -> T:
        """Return the reply to a call, without the name of the process, which comes with it.

        Raises as ``reply_of`` does.
        """
        try:
            incarnation, answer = await reply_of(ref, self.name, during)
        except ActorLost:
            self._lost()
            raise
        self._answered_by(incarnation)
        return answer

    async def back(self) -> None:
        """Return once it is there; at once, if it is not gone.

        Raises:
            ActorLost: It takes too long to come back.
        """
        try:
            async with asyncio.timeout(_START_S):
                while self.gone and self._probe is not None:
                    await asyncio.wait([self._probe])
        except TimeoutError:
            late = f"its new process does not answer for {_START_S:g} s"
            raise ActorLost(self.name, "start", late) from None

    def introduce(self) -> None:
        """Find out before a call which process has the name, if none has answered yet."""
        if self._standing == "starting" and self._probe is None:
            self._begin(self._until_answered())

    def doubt(self) -> None:
        """A group is past its deadline: a worker that does not answer a probe either is replaced.

        One that has not answered yet is starting, and has longer.
        """
        if self._standing != "gone" and self._probe is None:
            silent_s = _SILENT_S if self._standing == "up" else _START_S
            self._begin(self._replace_if_silent(silent_s))

    def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()

    def _lost(self) -> None:
        if not self.gone:
            self._standing = "gone"
            self.close()  # what is known needs no probe
            self._begin(self._until_answered())

    def _answered_by(self, incarnation: str) -> None:
        """Report a process at its first answer; one that was replaced may answer late."""
        self._standing = "up"
        if incarnation not in self._reported:
            self._reported.add(incarnation)
            self.on_joined(self.name, incarnation)

    def _begin(self, probe: Coroutine[Any, Any, None]) -> None:
        self._probe = asyncio.ensure_future(probe)

    async def _until_answered(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_START_S):
                    incarnation = await self._process.ping("start")
            except TimeoutError:
                self._replace(_START_S)
            except ActorLost:
                await asyncio.sleep(RETRY_S)
            except StartFailed:
                self._standing = "starting"  # the next call says it
                break
            else:
                self._answered_by(incarnation)
                break
        self._probe = None

    async def _replace_if_silent(self, silent_s: float) -> None:
        try:
            async with asyncio.timeout(silent_s):
                self._answered_by(await self._process.ping("a probe"))
        except TimeoutError:
            self._replace(silent_s)
        except (ActorLost, StartFailed):
            pass  # calls in progress fail with it
        self._probe = None

    def _replace(self, silent_s: float) -> None:
        """Kill a process that hangs; Ray starts another one."""
        log.warning("worker.lost", worker=self.name, silent_s=silent_s)
        self._process.kill()

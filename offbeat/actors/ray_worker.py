"""Tracks for its caller whether an environment worker is up, hangs, or is being restarted.

    starting --it answered--> up --lost, or killed--> gone --it answered--> up
       |                                                |
       +--no answer within the time to start: killed----+--the same, again and again

Until Ray has restarted a lost worker, calls to it fail at once, and each would cost its group an
attempt. So no call is made before the worker has answered a probe.

If a process is killed while no call is open, Ray restarts it without any error. So every reply
names its process, and a new name is reported.

While calls are open the process is probed, because Ray reports a lost machine after a minute, and a
broken network connection perhaps never. A separate thread answers probes, so a worker is not killed
if an environment blocks it. A loss is reported once, with its reason. The first answer to a probe
after a loss is reported, too, even if the same process is back.
"""

# pyright: reportUnknownMemberType=false
# Ray declares functions without the types of their parameters.

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, Literal, Protocol, TypeVar

import ray
import structlog

from offbeat.actors.call import Handle, await_reply
from offbeat.messages.failures import ActorLost, StartFailed
from offbeat.messages.fixed_times import RETRY_S
from offbeat.messages.worker_report import OnJoined, OnLost, OnReport, WorkerReport

T = TypeVar("T")
log = structlog.stdlib.get_logger()
_SILENT_S: Final = 10.0  # for the reply to a probe; a silent process counts as hanging
_PROBE_EVERY_S: Final = 2.0  # while calls are open
_MISSED_PROBES: Final = 2  # in a row; then the process or its machine counts as lost
# For a new process, imports included. After that it counts as hanging and is killed
_START_S: Final = 120.0


LIVENESS: Final = "liveness"
"""Concurrency group of a worker's probes, with an event loop that no environment blocks."""


class WorkerProcess(Protocol):
    """The current process of a worker."""

    async def ping(self, during: str) -> WorkerReport:
        """Return the name of the process, once it replies.

        Raises:
            ActorLost: The process has died, or is starting.
            StartFailed: The actor's constructor raised.
        """
        ...

    async def alive(self) -> None:
        """Return once the process replies, even if its event loop is blocked. Raises like ``ping``."""
        ...

    def kill(self) -> None:
        """Kill the process, so that Ray starts another one."""
        ...


class RayProcess:
    """The process of a Ray actor."""

    def __init__(self, name: str, handle: Handle) -> None:
        self._name, self._handle = name, handle

    async def ping(self, during: str) -> WorkerReport:
        return await await_reply(self._handle.ping.remote(), self._name, during)

    async def alive(self) -> None:
        await await_reply(self._handle.alive.remote(), self._name, "a probe")

    def kill(self) -> None:
        ray.kill(self._handle, no_restart=False)


class RayWorker:
    """One worker. Ray restarts its actor whenever it is lost."""

    def __init__(self, name: str, handle: Handle, process: WorkerProcess | None = None) -> None:
        """``process`` defaults to the process of the actor ``handle``."""
        self.name, self.handle = name, handle
        self._process = process or RayProcess(name, handle)
        self._state: Literal["starting", "up", "gone"] = "starting"
        self._probe: asyncio.Task[None] | None = None  # probe in progress
        self._reported = set[str]()  # processes that have replied
        self._calls = 0  # open calls
        self._watch: asyncio.Task[None] | None = None  # sends probes while calls are open
        self._given_up: asyncio.Future[str] | None = None  # holds the reason; ends the open calls
        self.on_joined: OnJoined = lambda name, incarnation: None  # noqa: ARG005 - nobody counts
        self.on_lost: OnLost = lambda name, reason: None  # noqa: ARG005 - as above
        self.on_report: OnReport = lambda report: None  # noqa: ARG005 - as above
        self._is_lost = False  # whether it is reported as lost, and not yet as back

    @property
    def gone(self) -> bool:
        """Return whether the process was lost and no process has replied since."""
        return self._state == "gone"

    async def answer(self, ref: "ray.ObjectRef[tuple[WorkerReport, T]]", during: str) -> T:
        """Return the reply to a call, without the process report that comes with it.

        Raises the errors of ``await_reply``, and ``ActorLost`` once the process is given up.
        """
        if self._given_up is None:
            self._given_up = asyncio.get_running_loop().create_future()
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._give_up_if_silent())
        self._calls += 1
        try:
            report, answer = await self._reply(ref, during, self._given_up)
        except ActorLost as lost:
            self._lost(lost.detail)
            raise
        finally:
            self._calls -= 1
        self._note_answer(report, is_probe=False)
        return answer

    async def _reply(
        self, ref: "ray.ObjectRef[T]", during: str, given_up: asyncio.Future[str]
    ) -> T:
        reply = asyncio.ensure_future(await_reply(ref, self.name, during))
        try:
            await asyncio.wait([reply, given_up], return_when=asyncio.FIRST_COMPLETED)
            if reply.done():
                return reply.result()
            raise ActorLost(self.name, during, given_up.result())
        finally:
            reply.cancel()

    async def back(self) -> None:
        """Wait until the worker is back. Return at once if it is not lost.

        Raises:
            ActorLost: The wait took too long.
        """
        try:
            async with asyncio.timeout(_START_S):
                while self.gone and self._probe is not None:
                    await asyncio.wait([self._probe])
        except TimeoutError:
            late = f"its new process does not answer for {_START_S:g} s"
            raise ActorLost(self.name, "start", late) from None

    def introduce(self) -> None:
        """Ask for the name of the process before a call, if no process has replied yet."""
        if self._state == "starting" and self._probe is None:
            self._begin(self._until_answered())

    def probe(self) -> None:
        """Probe the worker after a missed deadline, and replace it if it does not answer.

        A worker that has not replied yet is starting, and gets more time.
        """
        if self._state != "gone" and self._probe is None:
            silent_s = _SILENT_S if self._state == "up" else _START_S
            self._begin(self._replace_if_silent(silent_s))

    def close(self) -> None:
        for task in (self._probe, self._watch):
            if task is not None:
                task.cancel()

    def _lost(self, reason: str) -> None:
        self._report_lost(reason)
        if not self.gone:
            self._state = "gone"
            if self._probe is not None:
                self._probe.cancel()  # it is no longer needed
            self._begin(self._until_answered())

    def closed(self, report: WorkerReport) -> None:
        """Pass on the worker's last report."""
        self.on_report(report)

    def _report_lost(self, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.on_lost(self.name, reason)

    def _note_answer(self, report: WorkerReport, *, is_probe: bool) -> None:
        """Report a process at its first reply, and when a probe finds it alive after a loss.

        A reply to a call proves less: it may be late, and come from a process that was lost or
        replaced since.
        """
        self._state = "up"
        is_new = report.incarnation not in self._reported
        if is_new or (self._is_lost and is_probe):
            self._reported.add(report.incarnation)
            self._is_lost = False
            self.on_joined(self.name, report.incarnation)
        self.on_report(report)

    def _begin(self, probe: Coroutine[Any, Any, None]) -> None:
        self._probe = asyncio.ensure_future(probe)

    async def _until_answered(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_START_S):
                    report = await self._process.ping("start")
            except TimeoutError:
                self._replace(_START_S)
            except ActorLost:
                await asyncio.sleep(RETRY_S)
            except StartFailed:
                self._state = "starting"  # the next call reports it
                break
            else:
                self._note_answer(report, is_probe=True)
                break
        self._probe = None

    async def _give_up_if_silent(self) -> None:
        """Probe while calls are open. End the calls once the process is silent for too long."""
        missed = 0
        while self._calls and missed < _MISSED_PROBES:
            await asyncio.sleep(_PROBE_EVERY_S)
            if self._state != "up":
                missed = 0
                continue
            try:
                async with asyncio.timeout(_SILENT_S):
                    await self._process.alive()
            except TimeoutError:
                missed += 1
            except (ActorLost, StartFailed):
                missed = 0  # calls in progress fail with it
            else:
                missed = 0
        self._watch = None
        if missed == _MISSED_PROBES and self._given_up is not None:
            silent_s = _MISSED_PROBES * _SILENT_S
            self._replace(silent_s)
            self._given_up.set_result(_describe_kill(silent_s))
            self._given_up = None

    async def _replace_if_silent(self, silent_s: float) -> None:
        try:
            async with asyncio.timeout(silent_s):
                self._note_answer(await self._process.ping("a probe"), is_probe=True)
        except TimeoutError:
            self._replace(silent_s)
        except (ActorLost, StartFailed):
            pass  # calls in progress fail with it
        self._probe = None

    def _replace(self, silent_s: float) -> None:
        """Kill a process that hangs. Ray starts another one."""
        log.warning("worker.lost", worker=self.name, silent_s=silent_s)
        self._report_lost(_describe_kill(silent_s))
        self._process.kill()


def _describe_kill(silent_s: float) -> str:
    return f"it did not answer for {silent_s:g} s and was killed"

"""An environment worker as its caller sees it: whether its process is there, hangs, or comes back.

    starting --it answered--> up --lost, or killed--> gone --it answered--> up

Calls to a worker that is gone fail at once for as long as Ray takes to start it again, and each would
cost its group an attempt. So nobody makes one before it has answered a probe.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, Literal, TypeVar

import ray
import structlog

from offbeat.actors.call import reply_of
from offbeat.actors.handles import Handle
from offbeat.messages.failures import ActorLost, StartFailed

T = TypeVar("T")
log = structlog.stdlib.get_logger()
_SILENT_S: Final = 10.0  # one that answers a probe no sooner hangs
_START_S: Final = 120.0  # for a new process
_RETRY_S: Final = 0.25


class RayWorker:
    """One worker, whose actor Ray starts again whenever it is lost."""

    def __init__(self, name: str, handle: Handle) -> None:
        self.name, self.handle = name, handle
        self._standing: Literal["starting", "up", "gone"] = "starting"
        self._probe: asyncio.Task[None] | None = None  # the one under way

    @property
    def gone(self) -> bool:
        """Its process was lost, and no other one has answered yet."""
        return self._standing == "gone"

    async def answer(self, ref: "ray.ObjectRef[T]", during: str) -> T:
        """The reply to a call; raises as ``reply_of`` does."""
        try:
            answer = await reply_of(ref, self.name, during)
        except ActorLost:
            self._lost()
            raise
        self._standing = "up"
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

    def doubt(self) -> None:
        """A group is past its deadline: a worker that does not answer a probe either is replaced.

        One that has not answered yet is starting, and may take its time.
        """
        if self._standing == "up" and self._probe is None:
            self._begin(self._replace_if_silent())

    def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()

    def _lost(self) -> None:
        if not self.gone:
            self._standing = "gone"
            self.close()  # what is known needs no probe
            self._begin(self._until_answered())

    def _begin(self, probe: Coroutine[Any, Any, None]) -> None:
        self._probe = asyncio.ensure_future(probe)

    async def _until_answered(self) -> None:
        while True:
            try:
                await reply_of(self.handle.ping.remote(), self.name, "start")
            except ActorLost:
                await asyncio.sleep(_RETRY_S)
            except StartFailed:
                self._standing = "starting"  # the next call says it
                break
            else:
                self._standing = "up"
                break
        self._probe = None

    async def _replace_if_silent(self) -> None:
        try:
            async with asyncio.timeout(_SILENT_S):
                await reply_of(self.handle.ping.remote(), self.name, "a probe")
        except TimeoutError:
            log.warning("worker.lost", worker=self.name, silent_s=_SILENT_S)
            ray.kill(self.handle, no_restart=False)
        except (ActorLost, StartFailed):
            pass  # calls that are under way hear of it
        self._probe = None

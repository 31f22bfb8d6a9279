"""Hosts the controller in a Ray actor. The launcher passes a function that builds it."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, Protocol

import structlog

from offbeat.environments.exits import contain_exits
from offbeat.telemetry.logs import dump_stacks_on_signal

log = structlog.stdlib.get_logger()
_LOOK_S: Final = 1.0
# Seconds without a question of the driver, which asks twice a second. Then it is killed or hangs
_UNWATCHED_S: Final = 60.0


class HostedController(Protocol):
    """Interface between a run and its host."""

    async def run(self) -> bytes:
        """Run to the end and return the run's summary as JSON."""
        ...

    def status(self) -> bytes:
        """Return the run's status as JSON."""
        ...

    def abort(self, reason: str) -> None: ...
    def control(self, command: bytes) -> None:
        """Pass on an operator's command, given as JSON."""
        ...


class ControllerActor:
    """Async actor of the controller.

    ``status`` and ``abort`` are answered while ``run`` is in progress. Only the driver calls this
    actor, and the actors that it calls never call back. If the driver no longer asks for the
    status, nobody can end the run. Then the run ends itself, as with ``abort``.
    """

    def __init__(self, build: Callable[[], Awaitable[HostedController]]) -> None:
        dump_stacks_on_signal()
        self._build = build
        self._hosted: HostedController | None = None
        self._abort_reason: str | None = None
        self._unwatched_looks = 0  # in a row, without a question of the driver
        self._early_commands = list[bytes]()  # received while the run was being built

    async def run(self) -> bytes:
        """Build the controller on this actor's loop and run it to its end."""
        contain_exits()
        watch = asyncio.ensure_future(self._end_unwatched())
        try:
            self._hosted = await self._build()
            if self._abort_reason is not None:
                self._hosted.abort(self._abort_reason)
            for command in self._early_commands:
                self._hosted.control(command)
            return await self._hosted.run()
        except Exception:
            log.exception("controller.failed")
            raise
        finally:
            watch.cancel()

    async def _end_unwatched(self) -> None:
        """Abort the run once the driver has been silent for too long.

        Silence is measured by counting polls, so time in which this process is suspended does not
        count.
        """
        while self._unwatched_looks * _LOOK_S < _UNWATCHED_S:
            await asyncio.sleep(_LOOK_S)
            self._unwatched_looks += 1
        await self.abort(
            f"its driver has not asked for its status for {_UNWATCHED_S:g} s: it was killed or "
            "stopped, or it hangs"
        )

    async def leave(self) -> NoReturn:
        """End this process at once. The journal has everything that the next controller needs."""
        os._exit(0)

    async def status(self) -> bytes | None:
        """Return the run's status as JSON, or None before the run is built."""
        self._unwatched_looks = 0
        return None if self._hosted is None else self._hosted.status()

    async def abort(self, reason: str) -> None:
        """End the run now. If it has not begun, it ends at its start."""
        self._abort_reason = reason
        if self._hosted is not None:
            self._hosted.abort(reason)

    async def control(self, command: bytes) -> None:
        """Pause, resume, stop or abort.

        An early command applies at the start of the run.
        """
        if self._hosted is None:
            self._early_commands.append(command)
        else:
            self._hosted.control(command)

"""Writes finished groups to the run's spool, outside the event loop."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import structlog
from numpy.typing import NDArray

from offbeat.messages.groups import Receipt, Spooled
from offbeat.transfer_queue.spool import SpoolWriter

PATIENCE_S: Final = 5.0
"""Maximum seconds that a group waits for the disk. After that it is returned without a copy."""

log = structlog.stdlib.get_logger()
_Columns = Mapping[str, NDArray[Any]]
_Waiting = list[tuple[_Columns, "asyncio.Future[Spooled | None]"]]


class Spooling:
    """Writes each group to disk before it is returned. All methods belong to one event loop.

    Groups that finish during a write are written together by the next write. If the disk fails or
    hangs, only the copy is lost, never the group. This is logged once, and once more when the disk
    works again.
    """

    def __init__(self, writer: SpoolWriter, *, patience_s: float = PATIENCE_S) -> None:
        self._writer, self._patience_s = writer, patience_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._waiting: _Waiting = []
        self._writing: asyncio.Task[None] | None = None
        self._hangs = False  # the current write lasts longer than the patience
        self._without = 0  # consecutive groups without a copy
        self._incarnation = ""

    async def spool_group(self, receipt: Receipt, columns: _Columns) -> Receipt:
        """Write the group and return its receipt, with the copy's location if it was written.

        After a cancellation, the file may contain bytes that no receipt names. They do no harm.
        """
        if self._hangs:  # waiting for it would only use memory
            self._without += 1
            return receipt
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((columns, done))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_all())
        try:
            async with asyncio.timeout(self._patience_s):
                place = await done
        except TimeoutError:
            self._hangs = True
            self._note_refusal(f"the disk has not answered for {self._patience_s:g} s")
            return receipt
        return receipt if place is None else msgspec.structs.replace(receipt, spooled=place)

    def begin(self, incarnation: str) -> None:
        """Start new segments for the groups that this controller incarnation requests.

        The controller does not know which replies its predecessor received, but it removes copies
        that it does not need.
        """
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self._thread.submit(self._writer.rotate)

    async def close(self) -> None:
        """Write waiting groups and close the file."""
        if self._writing is not None and not self._hangs:
            await self._writing
        self._thread.submit(self._writer.rotate)
        self._thread.shutdown(wait=not self._hangs)

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            written = loop.run_in_executor(self._thread, self._write, waiting)
            await asyncio.wait([written])
            self._hangs = False
            for index, (_, done) in enumerate(waiting):
                if done.done():
                    continue  # cancelled meanwhile, or returned without a copy
                if bug := written.exception():
                    done.set_exception(bug)
                else:
                    done.set_result(self._handle_result(written.result()[index]))
        self._writing = None

    def _write(self, waiting: _Waiting) -> list[Spooled | OSError]:
        results = list[Spooled | OSError]()
        for columns, _ in waiting:
            try:
                results.append(self._writer.write(columns))
            except OSError as refused:
                results.append(refused)
        return results

    def _handle_result(self, result: Spooled | OSError) -> Spooled | None:
        if isinstance(result, OSError):
            self._note_refusal(str(result))
            return None
        if self._without:
            log.info("spool.works_again", groups_without=self._without)
            self._without = 0
        return result

    def _note_refusal(self, problem: str) -> None:
        if not self._without:
            log.warning("spool.refused", error=problem)
        self._without += 1

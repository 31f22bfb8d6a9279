"""Hosts a controller together with its journal, telemetry and summary."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from offbeat.controller.commands import Command
from offbeat.controller.controller import Controller
from offbeat.controller.errors import RunAborted, RunFailed
from offbeat.controller.journal import FileJournal, JournalTaken
from offbeat.controller.ledger import Ledger
from offbeat.messages.text import printable
from offbeat.runs.directory import SUMMARY
from offbeat.telemetry.evaluation_files import EvaluationFiles
from offbeat.telemetry.hub import Telemetry
from offbeat.telemetry.logs import Redactor
from offbeat.telemetry.trace import TraceFile
from offbeat.transfer_queue.spool_reader import SpoolReader

log = structlog.stdlib.get_logger()
_FLUSH_S = 1.5  # for telemetry after an abnormal end
_FINAL_FLUSH_S = 20.0  # for telemetry after a normal end


@dataclass(slots=True, eq=False)
class ControllerHost:
    """Runs the controller to its end and writes the summary, however the run ends."""

    controller: Controller
    run_id: str
    run_dir: Path
    journal: FileJournal
    telemetry: Telemetry
    trace: TraceFile
    spool: SpoolReader[Any]
    scores: EvaluationFiles
    redactor: Redactor
    _outcome: Literal["finished", "aborted", "failed"] = field(default="failed", init=False)
    _summary: bytes = field(default=b"", init=False)

    async def run(self) -> bytes:
        """Run to the end and return the summary as JSON.

        A failed run is an outcome here, not an error. The files are also closed after a bug.
        """
        self.telemetry.start()
        self.trace.start()
        try:
            with contextlib.suppress(RunFailed):  # the summary has the error
                await self.controller.run(on_ended=self._ended)
        finally:
            self._keep_journal(self.journal.close)  # a last checkpoint follows the summary
            if not self._is_replaced:
                await self._close_files()
        return self._summary

    async def _close_files(self) -> None:
        finished = self._outcome == "finished"
        flush_s = _FINAL_FLUSH_S if finished else _FLUSH_S
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.scores.close)
        await loop.run_in_executor(None, self.telemetry.close, flush_s)
        await loop.run_in_executor(None, self.trace.close, flush_s)
        await loop.run_in_executor(None, self.spool.close, self._segments_needed())

    @property
    def _is_replaced(self) -> bool:
        """Return whether a newer controller writes the files of this run."""
        return isinstance(self.journal.failure, JournalTaken)

    def status(self) -> bytes:
        return msgspec.json.encode(self.controller.progress.status())

    def abort(self, reason: str) -> None:
        self.controller.abort(reason)

    def control(self, command: bytes) -> None:
        self.controller.control(msgspec.json.decode(command, type=Command))

    def _segments_needed(self) -> set[str]:
        """Return the spool segments still needed, or none if the run has trained its last step."""
        state = self.controller.state
        return segments_needed(state.ledger) if state.step <= state.config.steps else set()

    def _ended(self, raised: BaseException | None) -> bool:
        """Write to disk everything that must survive, before any slow work.

        Return whether a newer controller owns the run. If so, write nothing.
        """
        aborted_by = ""
        match raised:
            case None:
                self._outcome = "finished"
            case RunFailed(causes=[RunAborted(reason=reason), *_]):
                self._outcome, aborted_by = "aborted", reason
            case _:
                self._outcome = "failed"
                log.error("run.failed", error=str(raised), exc_info=raised)
        summary = self.controller.progress.summary(
            self.run_id,
            self._outcome,
            None if raised is None else self.redactor(printable(str(raised) or repr(raised))),
        )
        summary = msgspec.structs.replace(
            summary,
            ended_by=aborted_by or summary.ended_by,
            failed_in_user_code=isinstance(raised, RunFailed) and raised.is_of_user_code,
            evaluation=self.scores.newest,
            evaluation_failure=self.redactor(printable(summary.evaluation_failure)),
        )
        self._keep_journal(self.journal.flush_now)
        self._summary = msgspec.json.encode(summary)
        if self._is_replaced:
            log.warning("run.taken_over", error=str(self.journal.failure))
            return True
        try:
            summary.write(self.run_dir / SUMMARY)
        except OSError as failure:  # a full disk: the driver still reports how the run ended
            log.error("summary.not_written", error=str(failure))  # noqa: TRY400
        return False

    def _keep_journal(self, write: Callable[[], bool]) -> None:
        if not write() and not self._is_replaced:
            log.error("journal.incomplete", error=str(self.journal.failure or "the disk is slow"))


def segments_needed(ledger: Ledger) -> set[str]:
    """Return the spool segments whose groups the next controller may train unchanged."""
    groups = (*ledger.ready.values(), *ledger.training.values())
    spooled = (group.receipt.spooled for group in groups if group.receipt is not None)
    return {place.segment for place in spooled if place is not None}

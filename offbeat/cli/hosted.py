"""A controller with everything around its run: journal, telemetry, summary."""

import asyncio
from pathlib import Path

import msgspec
import structlog

from offbeat.config.run import RunConfig
from offbeat.controller.controller import Controller
from offbeat.controller.errors import RunAborted, RunFailed
from offbeat.controller.journal import FileJournal
from offbeat.telemetry.hub import Telemetry
from offbeat.telemetry.summary import Summary

log = structlog.stdlib.get_logger()
_FLUSH_S = 1.5  # telemetry may take this long to catch up after an abnormal end
_FINAL_FLUSH_S = 20.0  # and this long after a normal one
SUMMARY = "summary.json"


class HostedRun:
    """Runs the controller to its end and writes the summary, whatever the end is."""

    def __init__(
        self,
        controller: Controller,
        config: RunConfig,
        *,
        run_id: str,
        run_dir: Path,
        journal: FileJournal,
        telemetry: Telemetry,
    ) -> None:
        self._controller, self._config = controller, config
        self._run_id, self._run_dir = run_id, run_dir
        self._journal, self._telemetry = journal, telemetry

    async def run(self) -> bytes:
        """Go to the end; the summary as JSON. A failed run is an outcome here, not an error."""
        self._telemetry.start()
        outcome, error = "failed", "the controller was cancelled"
        try:
            await self._controller.run()
            outcome, error = "finished", None
        except RunFailed as failure:
            asked = isinstance(failure.causes[0], RunAborted)
            outcome, error = "aborted" if asked else "failed", str(failure)
            log.error("run.ended", outcome=outcome, error=error, exc_info=not asked)  # noqa: TRY400
        finally:
            self._journal.close()
            summary = self._write_summary(outcome, error)
            flush_s = _FINAL_FLUSH_S if outcome == "finished" else _FLUSH_S
            await asyncio.get_running_loop().run_in_executor(None, self._telemetry.close, flush_s)
        return summary.to_json()

    def status(self) -> bytes:
        return msgspec.json.encode(self._controller.progress.status())

    def abort(self, reason: str) -> None:
        self._controller.abort(reason)

    def _write_summary(self, outcome: str, error: str | None) -> Summary:
        summary = self._controller.progress.summary(
            self._run_id, outcome, error, self._controller.release_digest
        )
        summary.write(self._run_dir / SUMMARY)
        return summary

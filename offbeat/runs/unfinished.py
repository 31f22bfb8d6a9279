"""Builds the summary of a run from its journal if the controller is lost.

Also finds the steps of an ended run that are in no checkpoint.
"""

from pathlib import Path
from typing import Literal

import msgspec
import structlog

from offbeat.config.run import RunConfig
from offbeat.controller.journal import JournalCorrupt, JournalVersion, recover_with_totals
from offbeat.controller.ledger import Ledger
from offbeat.controller.run_stats import summarize
from offbeat.controller.stats_records import RunTotals
from offbeat.run_files.limits import SUMMARY_BYTES, UNREADABLE, read_json
from offbeat.runs.directory import JOURNAL, SUMMARY, find_saved_version
from offbeat.telemetry.summary import Summary

log = structlog.stdlib.get_logger()
Outcome = Literal["aborted", "failed"]


def last_summary(
    run_dir: Path,
    config: RunConfig,
    run_id: str,
    outcome: Outcome,
    error: str,
    *,
    ended_by: str = "",
) -> Summary:
    """Return the controller's summary. If it is unreadable, build and write one from the journal.

    The journal has everything except the syncs. If the summary is damaged, this is logged. If the
    journal is damaged, this is added to the summary's error, so that the end of the run is still
    reported.
    """
    path = run_dir / SUMMARY
    try:
        return read_json(path, SUMMARY_BYTES, Summary)
    except FileNotFoundError:
        pass
    except UNREADABLE as damage:
        log.error("summary.unreadable", error=str(damage))  # noqa: TRY400
    journal, ledger, totals = run_dir / JOURNAL, Ledger(), RunTotals()
    try:
        if journal.exists():
            ledger, totals = recover_with_totals(journal)
    except (JournalCorrupt, JournalVersion, *UNREADABLE) as damage:
        log.error("journal.unreadable", error=str(damage))  # noqa: TRY400
        if str(damage) not in error:
            error = f"{error}; nothing is counted here: {damage}"
    summary = summarize(
        ledger,
        totals,
        run_id=run_id,
        name=config.name,
        steps_asked=config.steps,
        outcome=outcome,
        error=error,
    )
    summary = msgspec.structs.replace(summary, ended_by=ended_by)
    try:
        summary.write(path)
    except OSError as failure:  # a full disk: the display still shows how the run ended
        log.error("summary.not_written", error=str(failure))  # noqa: TRY400
    return summary


def describe_unsaved_steps(run_dir: Path, version: int) -> str:
    """Return a sentence on the steps up to ``version`` that no checkpoint has.

    Return an empty string if checkpoints have all steps.
    """
    kept = find_saved_version(run_dir)
    if kept >= version:
        return ""
    goes_on = f"the checkpoint of version {kept}" if kept else "the initial model"
    return (
        f"no checkpoint of version {version} was written by the end of the run; a resume continues from {goes_on}, "
        "and trains the later steps again"
    )

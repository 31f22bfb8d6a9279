"""Runs ``offbeat verify-weights`` and chooses its exit code."""

from pathlib import Path

import typer

from offbeat.launch.verify_weights import (
    NothingToCompare,
    VerifiedRun,
    verify_engines,
    verify_export,
)
from offbeat.launch.weight_requests import ask
from offbeat.messages.exit_codes import FAILED, FINISHED, REFUSED
from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import printable_lines
from offbeat.trainers.saved_weights import NoSavedWeights
from offbeat.weight_sync.verification import Leg, LegResult


def verify_weights_exit_code(
    what: Path, against: Path | None, *, engine: bool, wait_s: float
) -> int:
    """Print one line per leg; return 0 if all are equal, 1 if one differs, 2 if one is not compared.

    With ``engine`` an export is compared if there is one, and a missing one is no failure.
    """
    try:
        results = _results(what, against, engine=engine, wait_s=wait_s)
    except (OffbeatError, OSError) as error:
        typer.echo(printable_lines(str(error)), err=True)
        return REFUSED
    for each in results:
        typer.echo(printable_lines(str(each)), err=not each.is_equal)
    if any(each.difference is not None for each in results):
        return FAILED
    asked = (each for each in results if each.was_asked)
    return FINISHED if all(each.is_equal for each in asked) else REFUSED


def _results(what: Path, against: Path | None, *, engine: bool, wait_s: float) -> list[LegResult]:
    run = VerifiedRun(what, checkpoint_needed=not engine or against is not None)
    results = list[LegResult]()
    try:
        if run.checkpoint is not None:
            results += verify_export(run, against)
    except (NothingToCompare, NoSavedWeights) as missing:
        if not engine:
            raise
        export = f"no export ({missing})" if isinstance(missing, NothingToCompare) else str(missing)
        results.append(LegResult(Leg.EXPORT, str(run.checkpoint), problem=export, was_asked=False))
    if engine:
        results += verify_engines(run, ask(run.run_dir, wait_s))
    return results

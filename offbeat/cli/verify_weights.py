"""Collects the comparisons that ``offbeat verify-weights`` prints."""

from pathlib import Path

from offbeat.cli.arguments import refuse
from offbeat.launch.verify_weights import (
    NothingToCompare,
    VerifiedRun,
    verify_engines,
    verify_export,
)
from offbeat.launch.weight_requests import ask
from offbeat.messages.failures import OffbeatError
from offbeat.trainers.saved_weights import NoSavedWeights
from offbeat.weight_sync.verification import Leg, LegResult


def legs_or_exit(
    what: Path, against: Path | None, *, engine: bool, wait_s: float
) -> list[LegResult]:
    """Compare weights over every leg; if nothing can be compared, end the command with code 2.

    With ``engine`` an export is compared if there is one, and a missing one is no failure.
    """
    results = list[LegResult]()
    try:
        run = VerifiedRun(what, checkpoint_needed=not engine or against is not None)
        try:
            if run.checkpoint is not None:
                results += verify_export(run, against)
        except (NothingToCompare, NoSavedWeights) as missing:
            if not engine:
                raise
            is_export = isinstance(missing, NothingToCompare)
            problem = f"no export ({missing})" if is_export else str(missing)
            at = str(run.checkpoint)
            results.append(LegResult(Leg.EXPORT, at, problem=problem, was_asked=False))
        if engine:
            results += verify_engines(run, ask(run.run_dir, wait_s))
    except (OffbeatError, OSError) as error:
        refuse(error)
    return results

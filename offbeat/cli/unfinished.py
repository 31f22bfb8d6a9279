"""The summary of a run whose controller is gone without a word: what its journal can tell."""

from pathlib import Path
from typing import Literal

from offbeat.cli.past_run import folded
from offbeat.config.run import RunConfig
from offbeat.controller.history import History
from offbeat.controller.ledger import Ledger
from offbeat.telemetry.summary import Groups, Summary


def journalled_summary(
    journal: Path,
    config: RunConfig,
    run_id: str,
    outcome: Literal["aborted", "failed"],
    error: str,
) -> Summary:
    """What is known without the controller: not who was busy, nor how the syncs were.

    Raises:
        JournalCorrupt: A file of the journal is damaged.
        JournalVersion: Another version of offbeat wrote it.
        ImpossibleEvent: An event does not fit those before it.
    """
    ledger, history = Ledger(), History()
    for _, event in folded(journal, ledger) if journal.exists() else ():
        history.take(event)
    staleness = history.steps.staleness
    return Summary(
        run_id=run_id,
        name=config.name,
        outcome=outcome,
        error=error,
        steps=ledger.trainer_version,
        steps_asked=config.steps,
        trainer_version=ledger.trainer_version,
        groups=Groups(**ledger.counts(), dropped=ledger.totals.dropped),
        reward_first=history.steps.first,
        reward_last=history.steps.last,
        staleness_histogram=staleness,
        max_staleness_trained=max(staleness, default=0),
        wall_s=history.wall_s,
        first_step_s=history.first_step_s,
        samples_per_s=history.samples / history.serving_s if history.serving_s else 0.0,
        tokens_per_s=history.tokens / history.serving_s if history.serving_s else 0.0,
        rewinds=ledger.lineage,
        controller_lives=max(1, ledger.incarnation),
        resumes=history.resumes,
        weights_digest=ledger.digest,
    )

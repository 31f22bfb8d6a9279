"""Builds the summary of a run from the two folds of its events, of a live run and of a read one."""

from typing import Literal

from offbeat.controller.group_table import GroupTable
from offbeat.controller.history import History
from offbeat.messages.failures import Component
from offbeat.telemetry.summary import GroupCounts, Summary
from offbeat.telemetry.time_accounting import GeneratorTime, TrainerTime

Outcome = Literal["finished", "aborted", "failed"]


def folded_summary(
    table: GroupTable,
    history: History,
    *,
    run_id: str,
    name: str,
    steps_asked: int,
    outcome: Outcome,
    error: str | None,
) -> Summary:
    """Return what the events of a run add up to; losses, syncs and evaluations are in none.

    ``summary.json`` and the end table are made of it, and so are the page of a run and the summary
    of one whose controller was lost: a figure means the same in all of them.
    """
    staleness, tally = table.steps.staleness, history.tally
    trainer, engines = tally.shares()
    return Summary(
        run_id=run_id,
        name=name,
        outcome=outcome,
        error=error,
        steps=table.trainer_version,
        steps_asked=steps_asked,
        trainer_version=table.trainer_version,
        groups=GroupCounts(**table.counts(), dropped=dict(table.totals.dropped)),
        reward_first=table.steps.first,
        reward_last=table.steps.last,
        staleness_histogram=staleness,
        max_staleness_trained=max(staleness, default=0),
        masked_samples=history.masked_samples,
        wall_s=history.wall_s,
        first_step_s=history.first_step_s,
        samples_per_s=history.samples / history.serving_s if history.serving_s else 0.0,
        tokens_per_s=history.tokens / history.serving_s if history.serving_s else 0.0,
        trainer_busy_fraction=trainer.pop(TrainerTime.COMPUTE, 0.0),
        generator_busy_fraction=engines.pop(GeneratorTime.COMPUTE, 0.0),
        trainer_waits=trainer,
        generator_waits=engines,
        verdict="" if history.first_step_s is None else tally.verdict(),
        restarts=tally.restarts.get(Component.ENGINE, 0),
        worker_restarts=tally.restarts.get(Component.WORKER, 0),
        worker_losses=tally.worker_losses,
        workers_lost=sorted(tally.lost_workers),
        trainer_restarts=tally.restarts.get(Component.TRAINER, 0),
        engines_retired=sorted(tally.retired),
        rewinds=table.lineage,
        controller_incarnations=max(1, table.incarnation),
        resumes=history.resumes,
        weights_digest=table.digest,
    )

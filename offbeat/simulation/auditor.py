"""Audits a whole run independently and reports every violated invariant.

It reads only the journal and the actors' records, and shares no code with the ledger, the fleet or
the samplers, so it does not repeat their mistakes.

    records -> World    history according to the actors
    journal -> Groups   where every group is           I1 I3 I4 I8 I11
               Steps    what was trained               I2 I5 I7 I12
        AuditedEngines  what was served                I5 I6
    both    -> End      how it ended                   I3 I8 I9 I14 I15 I16
               Losses   cost of a lost machine         I17
               Samples  each sample once, masked ones nowhere  I18
        AuditedRewards  calls of reward functions      I20
        EngineRestarts  faults that explain restarts   I21
        AuditedWorkers  workers that were lost         I23
        Survivors  work while a machine is lost        I24

``audit_aggregates`` holds I22 by itself, in some of the episodes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from offbeat.config.run import RunConfig
from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Checkpointed,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    EngineLost,
    Joined,
    Opened,
    Released,
    Retired,
    Returned,
    RewardCallsMade,
    Rewound,
    Served,
    Spent,
    StepApplied,
    StepIntent,
    StepRefused,
    TrainerReplaced,
    Unclaimed,
    WorkerLost,
)
from offbeat.simulation.audit_end import End
from offbeat.simulation.audit_engines import AuditedEngines
from offbeat.simulation.audit_environments import Environments
from offbeat.simulation.audit_findings import Findings, Violation
from offbeat.simulation.audit_groups import IN_FLIGHT, AuditedGroups
from offbeat.simulation.audit_losses import Losses
from offbeat.simulation.audit_poison import Poison
from offbeat.simulation.audit_rewards import AuditedRewards
from offbeat.simulation.audit_steps import Steps
from offbeat.simulation.audit_survivors import Survivors
from offbeat.simulation.audit_workers import AuditedWorkers
from offbeat.simulation.audit_world import World
from offbeat.simulation.records import WorldRecord

__all__ = ["Violation", "audit"]


def audit(
    journals: Sequence[AnyEvent],
    records: Sequence[WorldRecord],
    config: RunConfig,
    *,
    prompts: int | None = None,
) -> list[Violation]:
    """Return every violation that journal and records show, the first cause first.

    Args:
        journals: The part of the journal that survived, oldest first, over all incarnations of the
            controller.
        records: Records of the actors, in order of events.
        config: Config of the run.
        prompts: Number of rows of the prompt source; None: endless, or unknown.
    """
    findings = Findings()
    world = World(config, findings)
    world.read(records)
    groups = AuditedGroups(config, prompts, findings)
    steps = Steps(config, groups, world, findings)
    engines = AuditedEngines(groups, world, findings)
    losses, poison = Losses(world, findings), Poison(config, world, findings)
    environments = Environments(config, findings)
    rewards, workers = AuditedRewards(config, records, findings), AuditedWorkers(records, findings)
    _read_journal(
        journals, groups, steps, engines, losses, poison, environments, rewards, workers, findings
    )
    poison.check()
    engines.check_retired()
    steps.check_trainer()
    findings.source, findings.index = "end", len(records)
    rewards.check_end()
    Survivors(config, records, findings).check()
    End(config, groups, steps, world, rewards, findings).check()
    return findings.violations


def _read_journal(  # noqa: PLR0913, PLR0917 - one reader for all tables
    journals: Sequence[AnyEvent],
    groups: AuditedGroups,
    steps: Steps,
    engines: AuditedEngines,
    losses: Losses,
    poison: Poison,
    environments: Environments,
    rewards: AuditedRewards,
    workers: AuditedWorkers,
    findings: Findings,
) -> None:
    def returned(event: Returned) -> None:
        if groups.is_ready(event.prompt_index):
            losses.returned_from_ready(event)
        groups.returned(event)
        rewards.returned(event)
        workers.returned(event)
        poison.returned(event)

    def opened(event: Opened) -> None:
        groups.opened(event)
        workers.opened(event)
        engines.opened(event)

    def dispatched(event: Dispatched) -> None:
        groups.dispatched(event)
        workers.dispatched(event)
        rewards.dispatched(groups.counts[IN_FLIGHT])
        engines.dispatched(event)

    def committed(event: Committed) -> None:
        environments.committed(event.receipt)
        steps.samples.committed(event.receipt)
        engines.committed(event, groups.committed(event))

    def rewound(event: Rewound) -> None:
        steps.rewound(event)
        engines.rewound(event)

    handlers: dict[type[Any], Callable[[Any], None]] = {
        Opened: opened,
        Rewound: rewound,
        Admitted: groups.admitted,
        Dispatched: dispatched,
        Returned: returned,
        Committed: committed,
        Claimed: steps.claimed,
        Unclaimed: steps.unclaimed,
        Dropped: groups.dropped,
        StepIntent: steps.intended,
        StepApplied: steps.applied,
        StepRefused: steps.refused,
        Checkpointed: steps.checkpointed,
        Released: engines.released,
        Served: engines.served,
        Retired: engines.retired,
        Joined: workers.joined,
        EngineLost: engines.lost,
        WorkerLost: workers.lost,
        TrainerReplaced: _skip,
        Spent: _skip,
        RewardCallsMade: rewards.reported,
    }
    findings.source = "journal"
    for findings.index, event in enumerate(journals):
        findings.current = event
        handlers[type(event)](event)


def _skip(event: AnyEvent) -> None:
    """Ignore a cost record: it has no invariant."""
    del event

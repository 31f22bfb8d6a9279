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

from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from math import gcd
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
    ReturnKind,
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
from offbeat.messages.groups import Receipt
from offbeat.simulation.audit_end import End
from offbeat.simulation.audit_engines import AuditedEngines
from offbeat.simulation.audit_findings import Findings, Violation
from offbeat.simulation.audit_groups import IN_FLIGHT, AuditedGroups
from offbeat.simulation.audit_rewards import AuditedRewards
from offbeat.simulation.audit_steps import Steps
from offbeat.simulation.audit_survivors import Survivors
from offbeat.simulation.audit_workers import AuditedWorkers
from offbeat.simulation.audit_world import World
from offbeat.simulation.records import WorldRecord


class Environments:
    """Environment of every committed prompt, and how many of a cycle each environment has."""

    def __init__(self, config: RunConfig, findings: Findings) -> None:
        weights = {name: each.weight for name, each in config.environments.items()} or {"": 1}
        divisor = reduce(gcd, weights.values())
        self._most = {name: weight // divisor for name, weight in weights.items()}
        self._cycle, self._findings = sum(self._most.values()), findings
        self._known = dict[int, str]()
        self._counts = Counter[tuple[int, str]]()  # prompts by cycle and environment

    def committed(self, receipt: Receipt) -> None:
        """Check the environment of a group that was committed."""
        index, name = receipt.prompt_index, receipt.environment
        if name not in self._most:
            self._findings.add("I19", f"group {index} is of environment {name!r}, which is none")
            return
        if index in self._known:  # committed before, by another attempt
            if self._known[index] != name:
                text = f"prompt {index} was of {self._known[index]!r}, and is of {name!r} now"
                self._findings.add("I19", text)
            return
        self._known[index] = name
        cycle = index // self._cycle
        self._counts[cycle, name] += 1
        if self._counts[cycle, name] > self._most[name]:
            self._findings.add(
                "I19",
                f"{self._counts[cycle, name]} of the {self._cycle} prompts from "
                f"{cycle * self._cycle} on are of {name!r}; its weight is {self._most[name]}",
            )


class Losses:
    """Compares the payloads that the journal gives up with those that the actors lost: I17.

    Only groups whose payload was only on a dead machine may be rolled out again.
    """

    def __init__(self, world: World, findings: Findings) -> None:
        self._world, self._findings = world, findings

    def returned_from_ready(self, event: Returned) -> None:
        """Check a ready group that is rolled out again for a failure of the infrastructure.

        Nothing but the loss of its payload is such a failure. A group that a new controller returns
        is of another kind: its payload may have died with the former controller.
        """
        if event.kind is not ReturnKind.INFRASTRUCTURE:
            return
        if (event.prompt_index, event.attempt) not in self._world.lost_payloads:
            self._findings.add(
                "I17",
                f"attempt {event.attempt} of group {event.prompt_index} is rolled out again as lost; no "
                "machine was lost that alone held its payload",
            )


class Poison:
    """Counts the engines that were given a poison prompt, according to the workers' records."""

    def __init__(self, config: RunConfig, world: World, findings: Findings) -> None:
        self._config, self._world, self._findings = config, world, findings
        # Attempts that ended for other reasons, by prompt index
        self._not_its_fault = Counter[int]()

    def returned(self, event: Returned) -> None:
        self._not_its_fault[event.prompt_index] += event.kind is not ReturnKind.INFRASTRUCTURE

    def check(self) -> None:
        """Check the retries.

        Attempts that were cancelled, or lost with their controller, do not count.
        """
        controllers = len(self._world.controller_ends)  # each may have lost its last records
        for prompt_index, attempts in self._world.poisoned.items():
            allowed = self._config.rollout.infrastructure_retries + 1
            allowed += self._not_its_fault[prompt_index] + controllers
            if len(attempts) > allowed:
                self._findings.add(
                    "I3",
                    f"poison prompt {prompt_index} was given to engines {len(attempts)} times; its "
                    f"retries allow {allowed}",
                )


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
